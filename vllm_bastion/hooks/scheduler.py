# SPDX-License-Identifier: Apache-2.0
"""Hooks in the engine core: what is scheduled, and what is counted.

The scheduler plans N placeholders for every request; the worker verifies fewer, and says how many
in `ModelRunnerOutput.bastion_num_verified` (request id -> nodes). Requests with a grammar are
decoded along the spine, so that gamma placeholders do: every one costs a bitmask row filled on the
CPU. And placeholders count against the tokens of a step, so that N for each of many requests would
leave some of them, and every prompt, without a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_bastion.config import bastion_config, chain_view, chain_view_of

# Attribute of ModelRunnerOutput: request id -> nodes verified in the step, root not counted.
NUM_VERIFIED = "bastion_num_verified"


class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's per-step statistics for trees: positions are depths, draft tokens are nodes."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified tree of `num_draft_tokens` nodes; 0 nodes is plain decoding."""
        within_depths = min(num_draft_tokens, self.num_spec_tokens)
        super().observe_draft(within_depths, num_accepted_tokens)
        self.num_draft_tokens += num_draft_tokens - within_depths


def make_spec_decoding_stats(
    original: Callable[..., Any],
    self: Any,
    spec_decoding_stats: Any,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    num_invalid_spec_tokens: dict[str, int] | None,
    request_id: str,
) -> Any:
    """Start a step's statistics with one entry per depth in place of one per node."""
    spec_config = bastion_config(self.vllm_config)
    if spec_config is not None and spec_decoding_stats is None and self.log_stats:
        spec_decoding_stats = TreeSpecDecodingStats.new(spec_config.bastion_gamma)
    return original(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    )


def update_from_output(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Turn nodes scheduled but not verified into vLLM's `num_invalid_spec_tokens`.

    vLLM subtracts those from the draft tokens it counts, for the engine and for the request.
    """
    verified = getattr(model_runner_output, NUM_VERIFIED, None)
    if verified is not None and bastion_config(self.vllm_config) is not None:
        # What a grammar ruled out before verification is there already.
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = {
            request_id: max(len(tokens) - verified.get(request_id, 0), invalid.get(request_id, 0))
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
    return original(self, scheduler_output, model_runner_output)


def prometheus_init(
    original: Callable[..., Any], self: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Make the per-position counters per depth; vLLM makes one for every speculative token."""
    from vllm_bastion.config import BastionSpeculativeConfig

    if isinstance(speculative_config, BastionSpeculativeConfig):
        speculative_config = chain_view(speculative_config)
    original(self, speculative_config, *args, **kwargs)


def structured_output_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Size bitmasks and grammar roll-back by depth: grammar requests are chains of gamma tokens."""
    original(self, chain_view_of(vllm_config))


# Share of a step's tokens that placeholders may take where requests are many.
_SHARE = 0.75


def _limits(scheduler: Any) -> tuple[int, int] | None:
    """Most placeholders of a request: of a free one, and of one with a grammar. None: not ours."""
    spec_config = bastion_config(scheduler.vllm_config)
    if spec_config is None:
        return None
    gamma = spec_config.bastion_gamma
    tokens = int(_SHARE * scheduler.scheduler_config.max_num_batched_tokens)
    # vLLM charges a request its root, its placeholders and `max_num_new_slots_for_drafting`, which
    # is gamma; one is left to spare. Never fewer placeholders than a chain has.
    fair = tokens // max(len(scheduler.running), 1) - 1 - (gamma + 1)
    free = max(fair, gamma)
    if spec_config.bastion_budget != "adaptive":
        free = min(free, max(spec_config.bastion_budget, 1))
    return free, min(free, gamma)


def update_after_schedule(original: Callable[..., Any], self: Any, scheduler_output: Any) -> None:
    """Take back placeholders past gamma that a grammar request was padded with on admission."""
    limits = _limits(self)
    if limits is not None:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, tokens in scheduled.items():
            extra = len(tokens) - limits[1]
            if extra > 0 and self.requests[request_id].use_structured_output:
                scheduled[request_id] = tokens[: limits[1]]
                scheduler_output.num_scheduled_tokens[request_id] -= extra
                scheduler_output.total_num_scheduled_tokens -= extra
    original(self, scheduler_output)


def async_update_after_schedule(
    original: Callable[..., Any], self: Any, scheduler_output: Any
) -> None:
    """Give every request its share of placeholders for the next step; vLLM gives all of them N."""
    original(self, scheduler_output)
    limits = _limits(self)
    if limits is not None:
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            most = limits[request.use_structured_output]
            if len(request.spec_token_ids) > most:
                # A new list: the placeholders are one list shared by all requests.
                request.spec_token_ids = request.spec_token_ids[:most]


def update_draft_token_ids(original: Callable[..., Any], self: Any, draft_token_ids: Any) -> None:
    """The same without async scheduling, where the drafts come from the worker."""
    limits = _limits(self)
    if limits is not None:
        drafts = draft_token_ids.draft_token_ids
        for index, request_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(request_id)
            if request is not None:
                drafts[index] = drafts[index][: limits[request.use_structured_output]]
    original(self, draft_token_ids)
