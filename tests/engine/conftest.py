# SPDX-License-Identifier: Apache-2.0
"""vLLM's substitutes for pinned memory and events, which must come before its GPU modules."""

import importlib

import pytest
from vllm.platforms import current_platform

from tests.interpreter import sample_without_triton

if current_platform.is_cpu():  # as vLLM's CPU worker does first
    importlib.import_module("vllm.v1.worker.cpu.shm")


@pytest.fixture
def pytorch_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a CPU worker: the interpreter cannot run vLLM's Triton kernel."""
    module = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setattr(module, "apply_top_k_top_p_triton", None)  # so that it is put back
    sample_without_triton()


@pytest.fixture
def replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernels as a CPU worker runs them; without this they run in the interpreter."""
    for holder, attribute, own in importlib.import_module("vllm_bastion.cpu.replacements").places():
        monkeypatch.setattr(holder, attribute, own)
