# SPDX-License-Identifier: Apache-2.0
"""The hook that gives the server its page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_bastion import envs


def load_endpoint_plugins(original: Callable[..., Any], supported_tasks: Any = None) -> Any:
    """vLLM's endpoint plugins, and ours if the user asks for it."""
    plugins = original(supported_tasks)
    if not envs.page_enabled() or "generate" not in (supported_tasks or ()):
        return plugins
    from vllm_bastion.page.endpoint import BastionPage

    return [*plugins, BastionPage()]
