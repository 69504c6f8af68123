# SPDX-License-Identifier: Apache-2.0
"""Native twins of the Triton kernels that Model Runner V2 launches on a CPU host.

Without a Triton back end vLLM's kernels are plain functions that nothing can launch. `install` puts
a function of the same arguments in the place of each, in every module that has it, for engines
that run V2 on such a host. A kernel whose parameters are not its twin's is refused, and one
without a twin says so when it is launched.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from vllm_bastion.cpu.twins import (  # noqa: F401  (each registers its twins)
    batch,
    blocks,
    dflash,
    gumbel,
    logprobs,
    rejection,
    sampling,
    thinking,
)
from vllm_bastion.cpu.twins.launch import TWINS, Twin

__all__ = ["TWINS", "Twin", "TwinError", "install", "parameters"]


class TwinError(RuntimeError):
    """A kernel of the installed vLLM is not the one its twin was written for."""


def parameters(kernel: Any) -> tuple[str, ...]:
    """Parameter names of a kernel, decorated by Triton or not."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def install() -> None:
    """Put every twin in its kernel's place; a second call changes nothing.

    Raises:
        TwinError: a kernel is gone or has other parameters than its twin.
    """
    found: dict[int, Twin] = {}
    for target, own in TWINS.items():
        module, _, name = target.partition(":")
        kernel = getattr(importlib.import_module(module), name, None)
        if isinstance(kernel, Twin):
            continue
        if kernel is None or parameters(kernel) != own.names:
            raise TwinError(
                f"vLLM's kernel {target} is not the one that its native twin was written for: "
                "install a vLLM that this vllm-bastion supports"
            )
        found[id(kernel)] = own
    for name, holder in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            for attribute, value in list(vars(holder).items()):
                if id(value) in found:
                    setattr(holder, attribute, found[id(value)])
    _complete_placeholder()


def _complete_placeholder() -> None:
    """Give vLLM's stand-in for Triton the helper that launches of V2 call."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.utils.math_utils import next_power_of_2

    if not HAS_TRITON:
        triton.next_power_of_2 = next_power_of_2
