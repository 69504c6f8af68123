# SPDX-License-Identifier: Apache-2.0
"""Environment of every test, set before vLLM or Triton is imported; order; the result table."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import interpreter
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
    # Run the engine core in the test's own process, where its state can be inspected.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ON_CPU = {
    # Read by Triton when it is imported, see tests/interpreter.py.
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    # Compiled functions check every index.
    "NUMBA_BOUNDSCHECK": "1",
}
for _name, _value in (_ENVIRONMENT | ({} if ON_GPU else _ON_CPU)).items():
    os.environ.setdefault(_name, _value)
if not ON_GPU:
    torch.set_num_threads(1)
    interpreter.enable()


@pytest.fixture(scope="session", autouse=not ON_GPU)
def _inspect_models_here() -> None:
    if "vllm" in sys.modules:  # a test may start an engine
        from helpers import inspect_models_here

        inspect_models_here()


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A command that runs in the test's process shows errors only, and only there."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Configs of a target (vocabulary 512, 4 layers) and a drafter (gamma 7), without weights.

    Also registers method "bastion" in the test's process.
    """
    from helpers import write_checkpoint
    from vllm_bastion import plugin

    plugin.register()
    folder = tmp_path_factory.mktemp("pair")
    return write_checkpoint(folder / "target"), write_checkpoint(folder / "drafter", "drafter")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect garbage once, after all imports, and freeze what is left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# The files that take longest, so that no core idles at the end. Where caches are empty the first
# engine compiles for all; so the second file has none.
_FIRST = (
    "test_lossless", "test_host", "test_load", "test_tree_attention", "test_serving", "test_check",
    "test_hybrids", "test_lookup", "test_tensor_parallel", "test_ngram", "test_quantised",
    "test_budget", "test_restored", "test_deferred", "test_kv_bits", "test_drafter_types",
    "test_scheduling", "test_compile", "test_gated_delta", "test_float8_cache", "test_replacements",
)  # fmt: skip


def _order(item: pytest.Item) -> tuple[int, bool]:
    first = _FIRST.index(item.path.stem) if item.path.stem in _FIRST else len(_FIRST)
    return first, item.get_closest_marker("e2e") is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, and skip those marked `gpu` without a GPU."""
    items.sort(key=_order)
    if ON_GPU:
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
