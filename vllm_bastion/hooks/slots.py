# SPDX-License-Identifier: Apache-2.0
"""K, the draft slots of a request in the step that is scheduled next, and the prompts beside them.

The placeholders of a slot are in vLLM's `Request.spec_token_ids`. Each function reads the scheduler
and changes nothing but these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_bastion.config import request_budget

# Requests that wait for something other than tokens and the KV cache.
UNREADY = (
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
)


def wants_drafts(scheduler: Any) -> bool:
    """Whether a request may have nodes in the next step and emit more than one token there."""
    most = scheduler.settings.num_speculative_tokens
    # Without running requests the first prompts are scheduled now.
    return not scheduler.running or any(
        request_budget(request.sampling_params, most) > 0
        and request.max_tokens - request.num_output_tokens > 2
        for request in scheduler.running
    )


def most_in_step(scheduler: Any, reqs: int) -> int:
    """As many nodes of each request as a step and the largest graph have room for.

    A step beyond the largest graph takes several times as long on an H100.
    """
    most, budget = scheduler.settings.num_speculative_tokens, scheduler.settings.bastion_budget
    if budget != "adaptive":
        most = min(most, max(budget, 1))
    compilation = scheduler.vllm_config.compilation_config
    rows = scheduler.max_num_scheduled_tokens
    if compilation.cudagraph_mode.has_full_cudagraphs():
        rows = min(rows, compilation.max_cudagraph_capture_size or rows)
    return max(min(most, rows // reqs - 1), 0)


def most_in_cache(scheduler: Any, most: int) -> list[int]:
    """Nodes of each running request, up to `most`, that the KV cache has room for.

    Placeholders for which there are no blocks would preempt a request. Blocks that earlier ones
    took stay with their request.
    """
    manager, running = scheduler.kv_cache_manager, scheduler.running
    groups = manager.coordinator.single_type_managers
    free = manager.block_pool.get_num_free_blocks()
    share = free // max(len(groups) * len(running), 1)
    beside = 1 + scheduler.num_lookahead_tokens
    if all(group.block_size * share >= most + beside for group in groups):
        return [most] * len(running)
    limits = []
    for request in running:
        blocks = ((g.block_size, g.req_to_blocks.get(request.request_id, ())) for g in groups)
        slots = min(size * (len(own) + share) for size, own in blocks)
        limits.append(max(min(most, slots - request.num_computed_tokens - beside), 0))
    return limits


def cut_placeholders(scheduler: Any) -> None:
    """Cut each running request's placeholders, `spec_token_ids`, to what it can use."""
    most, runs_ahead = scheduler.state.choice.num_drafts, isinstance(scheduler, AsyncScheduler)
    if scheduler.running:
        most = min(most, most_in_step(scheduler, len(scheduler.running)))
    for request, in_cache in zip(scheduler.running, most_in_cache(scheduler, most), strict=True):
        count = len(request.spec_token_ids)
        if not count:
            continue
        limit = min(count, in_cache, request_budget(request.sampling_params, most))
        if request.use_structured_output:
            limit = min(limit, scheduler.settings.max_grammar_tokens)
        if runs_ahead:
            limit = min(limit, _most_near_the_end(request, scheduler.max_model_len))
        if limit < count:
            # Make a new list: with async scheduling all requests share one list of placeholders.
            request.spec_token_ids = request.spec_token_ids[:limit]


def _most_near_the_end(request: Any, max_model_len: int) -> int:
    """Most placeholders of a request that leave its next step as many positions.

    vLLM counts each placeholder as a position. A step that may fill the model's length would leave
    none, and with async scheduling the next step would have to wait for its output.
    """
    known: int = request.num_computed_tokens - request.num_output_placeholders
    return max((max_model_len - known) // 2 - 1, 0)


def prompt_tokens(scheduler: Any, limit: int) -> int:
    """Tokens that prompts could use next beside one of each request, counted up to `limit`."""
    most = scheduler.scheduler_config.long_prefill_token_threshold or limit
    left = (
        request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        for request in scheduler.running
        if not request.spec_token_ids
    )
    # One in plain decoding; none, or fewer, while a step is in flight.
    tokens = sum(min(max(tokens - 1, 0), most) for tokens in left)
    for request in waiting(scheduler):
        if tokens >= limit:
            break
        # vLLM looks whether an unready one has become ready only while tokens are left.
        rows = 1 if request.status in UNREADY else request.num_tokens - request.num_computed_tokens
        tokens += min(rows, most)
    return tokens


def waiting(scheduler: Any) -> Iterator[Any]:
    """Requests that may come in, in the order in which vLLM's scheduler takes them."""
    state = scheduler.state
    running = len(scheduler.running)
    if state.blocked_for > 0 and state.blocked_at is not None and running >= state.blocked_at:
        return iter(())
    seats = scheduler.max_num_active_reqs - running
    others = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
    return islice(chain(scheduler.kv_holding_waiting, others), max(seats, 0))
