# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.widen`: a wide pair computes the function of its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tiny.drafter import load_drafter, save_drafter
from benchmarks.tiny.heads import Domino, Selector
from benchmarks.tiny.model import load_target, save_target
from benchmarks.widen.pairs import make_drafter, make_pair
from benchmarks.widen.widening import (
    SHAPES,
    TARGET_LAYER_IDS,
    Dims,
    Drafter,
    Shape,
    Target,
    Widening,
)
from tests.wide import Distance, Stored, check

VOCAB = 64
DIMS = Dims(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=6,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16,
)  # fmt: skip
IDS = torch.randint(2, VOCAB, (3, 24), generator=torch.Generator().manual_seed(5))
# Four times the hidden and head sizes: every factor is a power of two, so nothing is rounded.
EXACT = Shape(192, 96, 9, 8, 4, 64, 200, tie_word_embeddings=False, drafter_layers=5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair whose parts all matter: attention is peaked, norms differ by channel."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(3)
    target, drafter = Target(DIMS), Drafter(replace(DIMS, num_hidden_layers=2), mask_id=1)
    for model in (target, drafter):
        for name, weight in model.named_parameters():
            with torch.no_grad():
                if weight.dim() == 1:
                    # One key norm for all layers, as the drafter of the tiny pair has.
                    weight.fill_(1.25) if "k_norm" in name else weight.uniform_(0.5, 2.0)
                else:
                    weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
    save_target(target, folder / "target", eos_id=0)
    save_drafter(drafter, folder / "drafter", target, eos_id=0)
    (folder / "target" / "tokenizer.json").write_text("{}")
    return folder


def compared(shape: Shape, folder: Path, source: Path) -> dict[str, Distance]:
    """Write a wide pair in several files, and compare it with its source."""
    make_pair(shape, folder, source, shard_bytes=200_000)
    tiny = load_target(source / "target"), load_drafter(source / "drafter")
    return check(tiny, folder, IDS, TARGET_LAYER_IDS)


@pytest.mark.parametrize(
    "shape",
    [
        EXACT,
        replace(EXACT, tie_word_embeddings=True),
        replace(EXACT, vocab_size=VOCAB),
        replace(EXACT, drafter_layers=2),
        # Groups of one query need three copies of each KV head, groups of eight one.
        replace(EXACT, num_key_value_heads=8),
        replace(EXACT, num_attention_heads=16, num_key_value_heads=2),
    ],
    ids=["untied", "tied", "own vocabulary", "own drafter depth", "groups of 1", "groups of 8"],
)
def test_a_wide_pair_computes_the_tiny_ones_function(
    source: Path, tmp_path: Path, shape: Shape
) -> None:
    for kind, found in compared(shape, tmp_path, source).items():
        assert found.equal_argmax == found.positions > 60, kind
        # The remaining differences come from the constant channel and eps.
        assert found.largest_difference < 2e-3 * found.largest_logit, kind
        assert (found.gap is None) == (shape.vocab_size == VOCAB)


@pytest.mark.parametrize("shape", [EXACT, replace(EXACT, tie_word_embeddings=True)])
@pytest.mark.parametrize("kind", ["dflash2", "domino"])
def test_a_wide_head_corrects_as_the_tiny_one(
    source: Path, tmp_path: Path, kind: str, shape: Shape
) -> None:
    own = tmp_path / "source"
    own.mkdir()
    (own / "target").symlink_to(source / "target")
    (own / "drafter").symlink_to(source / "drafter")
    torch.manual_seed(4)
    drafter = load_drafter(source / "drafter")
    head = Selector(DIMS, 6) if kind == "dflash2" else Domino(DIMS, 6, 10)
    drafter.add_module(head.name, head)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    save_drafter(drafter, own / kind, load_target(source / "target"), eos_id=0)
    make_pair(shape, tmp_path / "wide", own)
    make_drafter(shape, tmp_path / "wide", kind, own)
    tiny = load_target(own / "target"), load_drafter(own / kind)
    found = check(tiny, tmp_path / "wide", IDS, TARGET_LAYER_IDS, kind)[kind]
    assert found.equal_argmax == found.positions > 60
    assert found.largest_difference < 2e-3 * found.largest_logit
    names = Stored(own / kind).names()
    wide = Stored(tmp_path / "wide" / kind)
    assert names <= wide.names() and wide["layers.4.mlp.up_proj.weight"].shape == (96, 192)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"head_dim": 8}, "head_dim"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"hidden_size": 48}, "padded vocabulary"),
    ],
)
def test_a_shape_that_is_too_small_is_refused_with_the_name_of_the_size(
    change: dict[str, int], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        Widening(DIMS, replace(EXACT, **change))


def test_the_tiny_pair_fits_every_known_shape() -> None:
    for shape in SHAPES.values():
        Widening(Dims(), shape)
