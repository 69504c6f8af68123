# SPDX-License-Identifier: Apache-2.0
"""Our scheduler without a KV cache, around a replacement for what vLLM's own does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_bastion.hooks.scheduler import BastionScheduler


def make_core(**attributes: Any) -> BastionScheduler:
    """A scheduler with these attributes in place of those that vLLM's constructor makes."""

    def init(self: Any) -> None:
        self.__dict__.update(attributes)

    with patch.object(Scheduler, "__init__", init):
        return BastionScheduler()


def call(core: BastionScheduler, name: str, original: Callable[..., Any], *args: Any) -> Any:
    """Call a method of ours, whose `super()` is `original`, a function of the arguments alone."""
    with patch.object(Scheduler, name, lambda _, *given: original(*given)):
        return getattr(core, name)(*args)
