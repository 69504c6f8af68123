# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of method "bastion", checked where vLLM checks sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_bastion.config import REQUEST_BUDGET, BastionSpeculativeConfig


def verify(
    original: Callable[..., None],
    self: Any,
    model_config: Any,
    speculative_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Check the request's own budget, which vLLM hands on unread."""
    original(self, model_config, speculative_config, *args, **kwargs)
    if isinstance(speculative_config, BastionSpeculativeConfig):
        check_budget(self.extra_args or {}, speculative_config.num_speculative_tokens)


def check_budget(extra_args: dict[str, Any], most: int) -> None:
    """Refuse a budget that is no whole number from 0 to `most`.

    Raises:
        VLLMValidationError: naming the key and the range; the server answers with status 400.
    """
    from vllm.exceptions import VLLMValidationError

    budget = extra_args.get(REQUEST_BUDGET, 0)
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= most:
        raise VLLMValidationError(
            f'"{REQUEST_BUDGET}" in extra_args (vllm_xargs) must be a whole number from 0, plain '
            f'decoding, to {most}, the engine\'s "num_speculative_tokens"; got {budget!r}'
        )
