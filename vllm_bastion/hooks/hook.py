# SPDX-License-Identifier: Apache-2.0
"""A row of the patch table: one thing outside of this package that it changes, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_bastion.hooks.wrap import wrap
from vllm_bastion.versions import capabilities

# Where a change is made. Any other text in `Change.when` names a narrower condition.
EVERY_PROCESS = "every process that loads vLLM's plugins"
BASTION_WORKER = 'every worker of an engine with method "bastion"'
GATED_DELTA_WORKER = 'a worker of method "bastion" whose target has gated delta layers'
NATIVE_WORKER = "every worker that runs Model Runner V2 on a CPU host without Triton"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One changed attribute of a module, a class or an object that is not ours."""

    target: str
    """`package.module:Class.attribute`; for an object, its class and the attribute."""
    why: str
    """What goes wrong without it."""
    what: str
    """What it does."""
    upstream: str
    """What would make it unnecessary."""
    when: str
    """Where it is made: one of the constants above, or a narrower condition."""
    on_instance: bool = False
    """Whether objects are changed, and not the class or module itself."""


@dataclass(frozen=True, kw_only=True)
class Hook(Change):
    """A function that `wrap` wraps in one of ours."""

    wrapper: str
    """`module:function` below vllm_bastion.hooks"""
    expects: str
    """The signature that the wrapper was written for, see `wrap.signature`. A module of
    `vllm_bastion.versions` may name another one for its version."""
    when: str = EVERY_PROCESS

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
