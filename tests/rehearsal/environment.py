# SPDX-License-Identifier: Apache-2.0
"""The process that the fake driver is loaded into: its environment, and starting over with it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.rehearsal.cases import ROOT

# Where `setup.sh` builds the driver, below the virtual environment.
LIBRARIES = Path(sys.prefix) / "fake_driver"
_CACHES = Path(sys.prefix) / "cache"


def variables() -> dict[str, str]:
    """Environment variables of a rehearsal, beside the user's."""
    preloaded = (LIBRARIES / "libfakeblas.so", LIBRARIES / "libcuda.so.1")
    paths = (str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH", ""))
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "TRITON_CACHE_DIR": str(_CACHES / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(_CACHES / "inductor"),
        "VLLM_CACHE_ROOT": str(_CACHES / "vllm"),
        "XDG_CACHE_HOME": str(_CACHES),
        "VLLM_BASTION_CACHE": tempfile.mkdtemp(prefix="rehearsal-"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # FlashInfer would compile its sampler first.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def enter(arguments: list[str]) -> None:
    """Start this program again with the driver loaded, unless it is.

    Raises FileNotFoundError: the driver has not been built.
    """
    if "libcuda.so.1" in os.environ.get("LD_PRELOAD", ""):
        return
    if not (LIBRARIES / "libcuda.so.1").exists():
        raise FileNotFoundError(f"{LIBRARIES} has no driver: run `make rehearse`")
    command = [sys.executable, "-m", "tests.rehearsal", *arguments]
    os.execve(sys.executable, command, {**os.environ, **variables()})


def break_graphs() -> None:
    """Let vLLM capture PIECEWISE graphs without torch.compile: read while vLLM is imported."""
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
