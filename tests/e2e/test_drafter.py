# SPDX-License-Identifier: Apache-2.0
"""The drafter drafts as it was trained to, whatever its config says or stale memory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import DRAFTER, ON_GPU, Batch, Engine

pytestmark = pytest.mark.e2e


def changed_drafter(folder: Path, **changes: object) -> str:
    config = json.loads((Path(DRAFTER) / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").symlink_to(Path(DRAFTER) / "model.safetensors")
    return str(folder)


PLAIN = Engine(max_num_seqs=2, eager=True)


def long_contexts() -> Batch:
    batch = Batch("contexts of 96 tokens and more")
    for domain in ("code", "arithmetic"):
        prompt = cases.long_prompt(domain, 96)
        batch.add(f"long-{domain}", prompt, temperature=0, max_tokens=32, ignore_eos=True)
    return batch


def test_a_drafter_trained_on_shorter_contexts(compare: Comparison, tmp_path: Path) -> None:
    """Its rotary cache covers the target's positions, so its drafts do not change."""
    batch = long_contexts()
    short = changed_drafter(tmp_path / "short", max_position_embeddings=64)
    engines = [PLAIN, PLAIN.with_bastion(8, 8), PLAIN.with_bastion(8, 8, model=short)]
    expected, usual, other = compare.all(engines, [batch])
    compare.same("a drafter of 64 positions", [batch], expected, other)
    assert other["batches"][0]["paths"] == usual["batches"][0]["paths"]
    accepted = other["batches"][0]["metrics"]["spec_decode_num_accepted_tokens"]
    assert accepted > len(other["batches"][0]["paths"])


def poison() -> None:
    """Setup: fill every uninitialised tensor, also in TorchInductor's code, with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Compile as usual, so that cached code can be loaded.
    torch._inductor.config.deterministic = False
    # Compiled code allocates its buffers here, and not with PyTorch's ops.
    guards: Any = torch._C._dynamo.guards
    allocate = guards._empty_strided_cpu

    def poisoned(*args: Any) -> torch.Tensor:
        out = allocate(*args)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    guards._empty_strided_cpu = poisoned


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="poisons a CPU's memory")
def test_nothing_reads_uninitialised_memory(compare: Comparison) -> None:
    """This includes the profiling run, which has no attention metadata."""
    compiled = Engine()
    batch, poison = long_contexts(), ["tests.e2e.test_drafter:poison"]
    # The number of nodes of test_lossless, so that its compiled models are loaded.
    tree = compare.submit(compiled.with_bastion(16, 8), [batch], setup=poison)
    compare.same("NaN in fresh memory", [batch], compare.run(PLAIN, [batch]), tree.result())
    assert max(map(len, tree.result()["batches"][0]["paths"])) > 4
