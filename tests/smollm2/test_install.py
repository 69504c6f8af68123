# SPDX-License-Identifier: Apache-2.0
"""The drafter that is stored without a head becomes the trained one beside its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.smollm2.install import OURS, SELECTOR, install, write_compact
from benchmarks.tiny.drafter import Drafter, Selector, load_drafter, save_drafter
from benchmarks.tiny.model import Dims, Target

DIMS = Dims(vocab_size=64, hidden_size=48, intermediate_size=80, head_dim=16)
WORDS = torch.tensor([1, 5, *range(30, 60)])
_MOST_BYTES = 20_000_000


def make_drafter() -> Drafter:
    return Drafter(replace(DIMS, num_hidden_layers=1), 3, vocabulary=WORDS, block_size=8)


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_installed_drafter_is_the_trained_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = Target(DIMS)
    folder = tmp_path / "target"
    folder.mkdir()
    embedding = target.embed_tokens.weight.detach().bfloat16()
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    for seed in (1, 2):  # the second replaces the first
        torch.manual_seed(seed)
        save_drafter(make_drafter(), tmp_path / "trained", target, eos_id=0)
        write_compact(tmp_path / "trained", tmp_path / "compact")
        assert "lm_head.weight" not in load_file(tmp_path / "compact" / "model.safetensors")
        install([tmp_path / "compact"], folder, tmp_path / "drafter")
        assert_same_weights(tmp_path / "trained", tmp_path / "drafter")
    written = tmp_path / "drafter" / "model.safetensors"
    before = written.stat().st_mtime_ns
    install([tmp_path / "compact"], folder, tmp_path / "drafter")
    assert written.stat().st_mtime_ns == before, "it was there already"
    assert load_drafter(tmp_path / "drafter").vocabulary.tolist() == WORDS.tolist()


def test_a_selector_is_stored_without_the_drafter_that_it_stands_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, drafter = Target(DIMS), make_drafter()
    save_drafter(drafter, tmp_path / "plain", target, eos_id=0)
    write_compact(tmp_path / "plain", tmp_path / "drafter")
    drafter.vocabulary = None
    drafter.add_module(Selector.name, Selector(drafter.dims, 4))
    save_drafter(drafter, tmp_path / "trained", target, eos_id=0)
    write_compact(tmp_path / "trained", tmp_path / "compact", tmp_path / "drafter")
    parts = [tmp_path / "drafter", tmp_path / "compact"]
    stored = [load_file(part / "model.safetensors").keys() for part in parts]
    assert not stored[0] & stored[1]
    install(parts, tmp_path, tmp_path / "installed")
    assert_same_weights(tmp_path / "trained", tmp_path / "installed")
    config = "config.json"
    assert (tmp_path / "installed" / config).read_text() == (parts[1] / config).read_text()


def test_the_stored_drafters_are_small_and_for_the_target() -> None:
    for folder in (OURS, SELECTOR):
        assert (folder / "model.safetensors").stat().st_size <= _MOST_BYTES
    drafter = load_drafter(OURS)
    sizes = drafter.dims.vocab_size, drafter.dims.hidden_size, drafter.block_size
    assert sizes == (49_152, 576, 8)
    assert int(drafter.vocabulary[0]) >= 0 and int(drafter.vocabulary[-1]) < 49_152
    weights = load_file(SELECTOR / "model.safetensors")
    assert weights["candidate_selector.predecessor_codebook"].shape[0] == 49_152
