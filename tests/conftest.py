# SPDX-License-Identifier: Apache-2.0
"""Environment of every test, set before vLLM or Triton is imported; order; the result table."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.report import (  # noqa: F401
    pytest_collection_finish,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

ON_GPU = torch.cuda.is_available()

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The engine in the test's own process: starts in seconds, and its insides can be looked at.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ON_CPU = {
    # vLLM's own Triton kernels, and ours where a test calls them, run in Triton's interpreter.
    "VLLM_BASTION_TRITON_INTERPRETER": "1",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
}
for _name, _value in (_ENVIRONMENT | ({} if ON_GPU else _ON_CPU)).items():
    os.environ.setdefault(_name, _value)
if not ON_GPU:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=not ON_GPU)
def _models_looked_at_here() -> None:
    if "vllm" in sys.modules:  # some test may start it up
        from helpers import look_at_models_here

        look_at_models_here()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Configs of a target (vocabulary 512, 4 layers) and a drafter (gamma 7), without weights.

    With it method "bastion" is registered in the test's process.
    """
    from helpers import write_checkpoint
    from vllm_bastion import plugin

    plugin.register()
    folder = tmp_path_factory.mktemp("pair")
    return write_checkpoint(folder / "target"), write_checkpoint(folder / "drafter", "drafter")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look through what is imported once, when all of it is there: it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# Files of tests that take longest, and what others find compiled: each begins in another process.
_FIRST = ("test_lossless", "test_products", "test_cuda_path", "test_serving", "test_native_engine")


def _place(item: pytest.Item) -> tuple[bool, int]:
    first = _FIRST.index(item.path.stem) if item.path.stem in _FIRST else len(_FIRST)
    return item.get_closest_marker("e2e") is None, first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that short ones fill the end; those marked `gpu` only where one is."""
    items.sort(key=_place)
    if ON_GPU:
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
