# SPDX-License-Identifier: Apache-2.0
"""CPU replacements of the Triton kernels that Model Runner V2 launches on a CPU host.

Without a Triton back end, vLLM's kernels are plain functions that cannot be launched. For engines
that run V2 on such a host, `install` replaces each of them, in every module of vLLM that has it, by
a function of the same arguments. It refuses a kernel whose parameters differ from the function's.
Kernels without a replacement belong to options and methods that are refused or do not run on vLLM's
CPU build; tests/cpu/without.py lists them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from vllm_bastion.cpu.replacements import (  # noqa: F401  (each registers its replacements)
    batch,
    blocks,
    dflash,
    gumbel,
    logprobs,
    sampling,
    state,
    thinking,
)
from vllm_bastion.cpu.replacements.launch import REPLACEMENTS, Replacement


class ReplacementError(RuntimeError):
    """A kernel of the installed vLLM is not the one that its replacement was written for."""


def parameters(kernel: Any) -> tuple[str, ...]:
    """Parameter names of a kernel, decorated by Triton or not."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def places() -> list[tuple[Any, str, Replacement]]:
    """The modules of vLLM that have a kernel, its name there, and its replacement.

    Raises:
        ReplacementError: a kernel is missing, or its parameters differ from its replacement's.
    """
    found: dict[int, Replacement] = {}
    for target, own in REPLACEMENTS.items():
        module, _, name = target.partition(":")
        kernel = getattr(importlib.import_module(module), name, None)
        if isinstance(kernel, Replacement):
            continue
        if kernel is None or not own.bind(parameters(kernel)):
            raise ReplacementError(
                f"vLLM's kernel {target} is not the one that its CPU replacement was written for: "
                "install a vLLM that this vllm-bastion supports"
            )
        found[id(kernel)] = own
    return [
        (holder, attribute, found[id(value)])
        for module, holder in list(sys.modules.items())
        if module.partition(".")[0] == "vllm"
        for attribute, value in list(vars(holder).items())
        if id(value) in found
    ]


def install() -> None:
    """Replace every kernel, see `places`; a second call changes nothing."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2

    for holder, attribute, own in places():
        setattr(holder, attribute, own)
    if not HAS_TRITON:  # a placeholder, which lacks a function that V2's launches call
        triton.next_power_of_2 = next_power_of_2
