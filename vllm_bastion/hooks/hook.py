# SPDX-License-Identifier: Apache-2.0
"""A row of the patch table: one function of vLLM that is wrapped, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_bastion.hooks.wrap import wrap
from vllm_bastion.versions import capabilities

# Where a function is wrapped.
EVERY_PROCESS = "every process that loads vLLM's plugins"
BASTION_WORKER = 'every worker of an engine with method "bastion"'
GATED_DELTA_WORKER = 'a worker of method "bastion" whose target has gated delta layers'


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A function that `wrap` wraps in one of ours."""

    target: str
    """`package.module:Class.attribute` or `package.module:name`"""
    wrapper: str
    """`module:function` below vllm_bastion.hooks"""
    expects: str
    """The signature that the wrapper was written for, see `wrap.signature`. A module of
    `vllm_bastion.versions` may name another one for its version."""
    why: str
    """What goes wrong without it."""
    when: str = EVERY_PROCESS
    """Where it is wrapped."""

    def function(self) -> Callable[..., Any]:
        """The wrapper itself."""
        module, _, name = self.wrapper.partition(":")
        found = getattr(importlib.import_module(f"vllm_bastion.hooks.{module}"), name)
        assert callable(found)
        return found

    def signature(self) -> str:
        """The signature that the installed vLLM must have."""
        return capabilities().signatures.get(self.target, self.expects)

    def install(self) -> None:
        """Wrap the target; a second call does nothing.

        Raises:
            HookError: the target is missing, or has another signature.
        """
        wrap(self.target, self.function(), expects=self.signature())
