# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoding step on the device, from the traces of vLLM's own profiler."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bastion_kernels

# PyTorch's categories of device work.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Kernels of others that are listed by name.
_LISTED = 12


def profiler_config(folder: str) -> dict[str, Any]:
    """vLLM's `profiler_config`: traces of the device to `folder`, an absolute path."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def our_kernels() -> set[str]:
    """Names of the Triton kernels of this package."""
    names = set()
    for module in pkgutil.walk_packages(bastion_kernels.__path__, "bastion_kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if hasattr(value, "fn") and value.fn.__module__ == module.name:
                names.add(value.fn.__name__)
    return names


def device_ms(folder: Path) -> Counter[str]:
    """Milliseconds on the device by kernel name, over all traces, which are deleted."""
    out: Counter[str] = Counter()
    for path in folder.glob("*.json"):
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("cat") in _ON_DEVICE:
                out[event["name"]] += event["dur"] / 1e3
        path.unlink()
    return out


def profile_steps(
    llm: Any, generate: Callable[[int], object], steps: int, step_ms: float, folder: Path
) -> dict[str, Any]:
    """Milliseconds of a step by kind of device work.

    Args:
        llm: an engine with `profiler_config(folder)`.
        generate: decodes that many tokens, one a step.
        steps: how many to look at.
        step_ms: time of a step without the profiler.

    Returns:
        `busy_ms`; `idle_ms`, what is left of `step_ms`; `ours` and the largest of `others`, by
        kernel. What the prompt costs is taken off.
    """
    seen = []
    for tokens in (1, 1 + steps):
        llm.start_profile()
        generate(tokens)
        llm.stop_profile()
        seen.append(device_ms(folder))
    prompt, whole = seen
    ms = {name: (whole[name] - prompt[name]) / steps for name in whole}
    names = our_kernels()
    ours = {name: value for name, value in ms.items() if name in names}
    others = Counter({name: value for name, value in ms.items() if name not in names})
    busy = sum(ms.values())
    return {
        "busy_ms": busy,
        "idle_ms": step_ms - busy,
        "ours": dict(sorted(ours.items(), key=lambda item: -item[1])),
        "others": dict(others.most_common(_LISTED)),
    }
