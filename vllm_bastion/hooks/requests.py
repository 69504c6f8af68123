# SPDX-License-Identifier: Apache-2.0
"""Wrappers that check a request's sampling parameters in the front end.

vLLM does not read a request's own budget, so it is checked here.

Model Runner V2 keeps some parameters in tables of fixed size. Its worker raises when a request does
not fit, which ends the engine with all its other requests. Here such a request is refused before
it reaches the engine core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError

from vllm_bastion.config import PREFIX, REQUEST_BUDGET, BastionSpeculativeConfig, bastion_config

# Of `vllm.v1.worker.gpu.sample.logit_bias`. The front end must not import the worker's modules.
MAX_NUM_ALLOWED_TOKEN_IDS = 1024
MAX_NUM_LOGIT_BIAS_TOKENS = 1024
MAX_NUM_STOP_TOKEN_IDS = 128


def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a session, a wrong budget, and a request that the worker's tables cannot hold."""
    config = bastion_config(self.vllm_config)
    if config is not None and kwargs.get("resumable"):
        raise VLLMValidationError(
            'Streaming-input sessions are not served with method "bastion"; send each turn as a '
            "request of its own."
        )
    request = original(self, *args, **kwargs)
    params = request.sampling_params
    if params is not None and config is not None:
        check_budget(params.extra_args or {}, config.num_speculative_tokens)
        check_tables(params)
    return request


def check_tables(params: Any) -> None:
    """Check a request that is ready to be sent: with its stop tokens and tokenized bad words.

    Raises:
        VLLMValidationError: naming the parameter; the server answers with status 400.
    """
    bad_words = params.bad_words_token_ids or ()
    sizes = (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS, ""),
        ("logit_bias", len(params.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS, ""),
        (
            "stop_token_ids",
            len(params.all_stop_token_ids) if params.min_tokens > 0 else 0,
            MAX_NUM_STOP_TOKEN_IDS,
            " with min_tokens, the model's own stop tokens included",
        ),
        ("bad_words", len(bad_words), envs.VLLM_MAX_NUM_BAD_WORDS, " once tokenized"),
    )
    for name, size, limit, condition in sizes:
        if size > limit:
            raise VLLMValidationError(
                f"{name} has {size} entries{condition}; at most {limit} are possible.",
                parameter=name,
                value=size,
            )
    tokens, limit = sum(map(len, bad_words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > limit:
        raise VLLMValidationError(
            f"bad_words have {tokens} tokens in all; at most {limit} are possible.",
            parameter="bad_words",
            value=tokens,
        )


def validate_spec_decode(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    """Accept `min_p` and `logit_bias`: trees are sampled row by row, as plain decoding is."""
    if not isinstance(speculative_config, BastionSpeculativeConfig):
        original(self, speculative_config)


def check_budget(extra_args: dict[str, Any], most: int) -> None:
    """Refuse a budget that is not a whole number from 0 to `most`, and other keys of ours.

    Raises:
        VLLMValidationError: naming the key and the range; the server answers with status 400.
    """
    for key in extra_args:
        if key != REQUEST_BUDGET and key.startswith(PREFIX.rstrip("_")):
            raise VLLMValidationError(
                f'"{key}" in extra_args (vllm_xargs) is unknown: a request\'s own budget is '
                f'"{REQUEST_BUDGET}"'
            )
    budget = extra_args.get(REQUEST_BUDGET, 0)
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= most:
        raise VLLMValidationError(
            f'"{REQUEST_BUDGET}" in extra_args (vllm_xargs) must be a whole number from 0, plain '
            f'decoding, to {most}, the engine\'s "num_speculative_tokens"; got {budget!r}'
        )
