# SPDX-License-Identifier: Apache-2.0
"""Hooks on a server of method "bastion": it reports users' mistakes, and has a page.

`SERVER_HOOKS` are installed when a server makes its configuration, so that no other process imports
the server's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from vllm.exceptions import VLLMValidationError

from vllm_bastion import envs
from vllm_bastion.config import PREFIX, REQUEST_BUDGET
from vllm_bastion.hooks.ledger import Hook

_API = "vllm.entrypoints.openai"


def _row(target: str, parameters: str) -> Hook:
    return Hook(
        target=target,
        wrapper="server:to_sampling_params",
        expects=f"(self, {parameters}, default_sampling_params"
        + ("=)" if "chat" not in target else ")"),
        why="vLLM ignores fields that it does not know, so a budget outside of vllm_xargs has no "
        "effect",
        what="refuses the request, and says where the budget belongs",
        upstream="a per-request number of speculative tokens",
        when='every API server of an engine with method "bastion"',
    )


SERVER_HOOKS = (
    _row(f"{_API}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params", "max_tokens"),
    _row(f"{_API}.completion.protocol:CompletionRequest.to_sampling_params", "max_tokens"),
    _row(f"{_API}.responses.protocol:ResponsesRequest.to_sampling_params", "default_max_tokens"),
)


def install() -> None:
    """Install the hooks in this process."""
    for hook in SERVER_HOOKS:
        hook.install()


def to_sampling_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a field of our name among those of vLLM."""
    for field in self.model_extra or ():
        if field.startswith(PREFIX.rstrip("_")):
            raise VLLMValidationError(
                f'"{field}" is not a field of a request: a request\'s own budget is '
                f'"vllm_xargs": {{"{REQUEST_BUDGET}": ...}}',
                parameter=field,
            )
    return original(self, *args, **kwargs)


def end(refusal: Exception) -> NoReturn:
    """End the server with status 1 and its refusal, without the traceback of an exception."""
    raise SystemExit(f"vllm serve: {refusal}") from None


def load_endpoint_plugins(original: Callable[..., Any], supported_tasks: Any = None) -> Any:
    """vLLM's endpoint plugins, and ours if the user asks for it."""
    plugins = original(supported_tasks)
    if not envs.page_enabled() or "generate" not in (supported_tasks or ()):
        return plugins
    from vllm_bastion.page.endpoint import BastionPage

    return [*plugins, BastionPage()]
