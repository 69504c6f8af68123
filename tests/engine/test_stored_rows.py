# SPDX-License-Identifier: Apache-2.0
"""The rows of steps without a draft that are stored for the drafter: when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.hooks.model_runner import BastionModelRunner


def test_rows_that_wait_are_stored_before_vllm_copies_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, order = object.__new__(BastionModelRunner), []
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda *_: order.append("runs"))
    runtime = runner.runtime = Runtime(SimpleNamespace())
    runtime.context = SimpleNamespace(flush=lambda: order.append("stored"))
    for copies in (None, [object()]):
        output = SchedulerOutput.make_empty()
        output.kv_cache_block_copies = copies
        runner.execute_model(output)
    assert order == ["runs", "stored", "runs"]
