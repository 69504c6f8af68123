# SPDX-License-Identifier: Apache-2.0
"""The drafter drafts as it was trained to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import DRAFTER, Batch, Engine, Runner

pytestmark = pytest.mark.e2e


def changed_drafter(folder: Path, **changes: object) -> str:
    """The tiny drafter with other entries in its config."""
    config = json.loads((Path(DRAFTER) / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").symlink_to(Path(DRAFTER) / "model.safetensors")
    return str(folder)


def long_contexts() -> Batch:
    """Contexts of 96 tokens and more."""
    batch = Batch("contexts beyond the drafter's max_position_embeddings")
    for domain in ("code", "arithmetic"):
        prompt = cases.long_prompt(domain, 96)
        batch.add(f"long-{domain}", prompt, temperature=0, max_tokens=32, ignore_eos=True)
    return batch


def test_a_drafter_trained_on_shorter_contexts(
    runner: Runner, compare: Comparison, tmp_path: Path
) -> None:
    """Its rotary cache reaches as far as the target's positions: it drafts what it always does."""
    batch, plain = long_contexts(), Engine(max_num_seqs=2)
    short = changed_drafter(tmp_path / "short", max_position_embeddings=64)
    engines = [plain, plain.with_bastion(8, 8), plain.with_bastion(8, 8, model=short)]
    runs = [runner.submit(engine, [batch]) for engine in engines]
    expected, usual, other = (run.result() for run in runs)
    compare.same("a drafter of 64 positions", [batch], expected, other)
    assert other["batches"][0]["paths"] == usual["batches"][0]["paths"]
    accepted = other["batches"][0]["metrics"]["spec_decode_num_accepted_tokens"]
    assert accepted > len(other["batches"][0]["paths"])
