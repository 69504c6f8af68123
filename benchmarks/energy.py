# SPDX-License-Identifier: Apache-2.0
"""The machine's energy counter, where it has one that may be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

_RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


def joules() -> float | None:
    """Joules since some moment, of the current GPU or of the first processor package, or None.

    A package's counter starts again at zero after minutes to hours; the difference is then
    negative and must be left out.
    """
    return _counter()()


@cache
def _counter() -> Callable[[], float | None]:
    for make in (_gpu, _package):
        try:
            counter = make()
            if counter is not None and counter() is not None:
                return counter
        except Exception:  # no permission, or a device without a counter
            continue
    return lambda: None


def _gpu() -> Callable[[], float | None] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def _package() -> Callable[[], float | None] | None:
    return (lambda: int(_RAPL.read_text()) / 1e6) if _RAPL.exists() else None
