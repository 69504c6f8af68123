# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.widen`: a wide pair computes the function of its source."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.tiny.drafter import Selector, load_drafter, save_drafter
from benchmarks.tiny.model import hf_config, load_target, save_bf16
from benchmarks.widen import Dims, Drafter, Shape, Target, make_pair, read_config

VOCAB = 64
DIMS = Dims(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=6,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16,
)  # fmt: skip
IDS = torch.randint(2, VOCAB, (3, 24), generator=torch.Generator().manual_seed(5))
# Four times the hidden and head sizes: every factor is a power of two, so nothing is rounded.
EXACT = Shape(192, 96, 9, 8, 4, 64, 200, drafter_layers=5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair whose parts all matter: attention is peaked, norms differ by channel."""
    folder, target = tmp_path_factory.mktemp("pair"), Target(DIMS)
    drafter = Drafter(replace(DIMS, num_hidden_layers=2), mask_id=1)
    torch.manual_seed(3)
    for model in (target, drafter):
        for name, weight in model.named_parameters():
            with torch.no_grad():
                if weight.dim() == 1:
                    # One key norm for all layers, as the drafter of the tiny pair has.
                    weight.fill_(1.25) if "k_norm" in name else weight.uniform_(0.5, 2.0)
                else:
                    weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
    config = hf_config(DIMS, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    weights = {f"model.{name}": w for name, w in target.model.state_dict().items()}
    save_bf16(weights, folder / "target", config)
    save_drafter(drafter, folder / "drafter", target, eos_id=0)
    (folder / "target" / "tokenizer.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def fill(module: nn.Module, stored: dict[str, Tensor], prefix: str = "") -> None:
    module.load_state_dict({name: stored[prefix + name] for name in module.state_dict()})


def open_pair(folder: Path, kind: str) -> tuple[Target, Drafter, Tensor]:
    """A wide pair in float32, with `kind` as its drafter, and the head's weights [V, H]."""
    stored, drafted = read(folder / "target"), read(folder / kind)
    own, theirs = (read_config(folder / name) for name in ("target", kind))
    names = [field.name for field in fields(Dims)]
    dims, drafter_dims = (Dims(**{name: c[name] for name in names}) for c in (own, theirs))
    target, settings = Target(dims, own["model_type"]), theirs["dflash_config"]
    fill(target.model, stored, "model.")
    drafter = Drafter(drafter_dims, settings["mask_token_id"])
    drafter.fc = nn.Linear(drafted["fc.weight"].shape[1], dims.hidden_size, bias=False)
    fill(drafter, drafted)
    if "selector_rank" in settings:
        drafter.candidate_selector = Selector(drafter_dims, settings["selector_rank"])
        fill(drafter.candidate_selector, drafted, f"{Selector.name}.")
    return target.eval(), drafter.eval(), stored["model.embed_tokens.weight"].float()


def assert_equal(truth: Tensor, logits: Tensor) -> None:
    """The best token is the same in the whole vocabulary, and the tiny one's logits are equal."""
    assert truth[..., 0].numel() > 60 and torch.equal(truth.argmax(-1), logits.argmax(-1))
    # The remaining differences come from the constant channel and eps.
    difference = (truth - logits[..., : truth.shape[-1]]).abs().max()
    assert difference < 2e-3 * truth.abs().max()


@torch.inference_mode()
def check(source: Path, folder: Path, kind: str = "drafter") -> None:
    """Compare a written pair with the tiny one that it was made from.

    Targets at every position, drafters on the blocks that start at the middle and at the last one.
    A head that corrects its logits sees the best uncorrected tokens.
    """
    small, small_drafter = load_target(source / "target"), load_drafter(source / kind)
    wide, wide_drafter, head = open_pair(folder, kind)
    wide_features = tuple(read_config(folder / kind)["dflash_config"]["target_layer_ids"])
    states, features = small(IDS, features=small.feature_layers)
    wide_states, read_features = wide(IDS, features=wide_features)
    assert_equal(small.logits(states), wide_states @ head.T)
    last = IDS.shape[1] - 1
    anchors = torch.tensor([[last // 2, last]]).expand(len(IDS), -1)
    tokens = IDS.gather(1, anchors)
    block = small_drafter(small, features, tokens, anchors)
    wide_block = wide_drafter(wide, read_features, tokens, anchors)
    before = torch.cat([tokens[..., None], small.logits(block).argmax(-1)[..., :-1]], dim=-1)
    drafted = read(folder / kind)
    logits = wide_block @ drafted.get("lm_head.weight", head).float().T
    if "d2t" in drafted:
        assert torch.equal(drafted["d2t"], read(source / kind)["d2t"])
    if wide_drafter.head is not None:
        logits += wide_drafter.head.bias(before, wide_block)
    assert_equal(small_drafter.logits(small, block, before), logits)


@pytest.mark.parametrize(
    "shape",
    [
        EXACT,
        replace(EXACT, vocab_size=VOCAB),
        replace(EXACT, drafter_layers=2),
        # Groups of one query need three copies of each KV head, groups of eight one.
        replace(EXACT, num_key_value_heads=8),
        replace(EXACT, num_attention_heads=16, num_key_value_heads=2),
    ],
    ids=["more tokens", "own vocabulary", "own drafter depth", "groups of 1", "groups of 8"],
)
def test_a_wide_pair_computes_the_tiny_ones_function(
    source: Path, tmp_path: Path, shape: Shape
) -> None:
    make_pair(shape, tmp_path, source, shard_bytes=200_000)
    check(source, tmp_path)


def test_a_wide_head_corrects_as_the_tiny_one(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "source"
    own.mkdir()
    (own / "target").symlink_to(source / "target")
    (own / "drafter").symlink_to(source / "drafter")
    torch.manual_seed(4)
    drafter = load_drafter(source / "drafter")
    head = Selector(DIMS, 6)
    drafter.add_module(head.name, head)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    save_drafter(drafter, own / "dflash2", load_target(source / "target"), eos_id=0)
    make_pair(EXACT, tmp_path / "wide", own, kinds=("target", "drafter", "dflash2"))
    check(own, tmp_path / "wide", "dflash2")
    wide = read(tmp_path / "wide" / "dflash2")
    assert read(own / "dflash2").keys() <= wide.keys()
    assert wide["layers.4.mlp.up_proj.weight"].shape == (96, 192)
