# SPDX-License-Identifier: Apache-2.0
"""K, the draft slots of a request in the step that is scheduled next, and the prompts beside them.

A slot's placeholder is an entry of vLLM's `Request.spec_token_ids`; nothing else is written here.
For speed, the common case calls no function for each decoding request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import Any

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
    for request in scheduler.running:
        params = request.sampling_params
        own = 1 if params is None or not params.extra_args else request_budget(params, 1)
        if own > 0 and request.max_tokens - request.num_output_tokens > 2:
            return True
    # Without running requests the first prompts are scheduled now.
    return not scheduler.running


def most_in_step(scheduler: Any, reqs: int) -> int:
    """The most nodes of each request that fit into a step and the largest graph.

    A step beyond the largest graph takes several times as long on an H100.
    """
    most = min(scheduler.max_num_scheduled_tokens, scheduler.graph_rows) // reqs - 1
    if most < 0:
        return 0
    return most if most < scheduler.most_nodes else int(scheduler.most_nodes)


def most_in_cache(scheduler: Any, most: int, requests: Sequence[Any]) -> list[int] | None:
    """Nodes of each request, up to `most`, that fit into the KV cache; None if all `most` fit.

    Placeholders without free blocks would preempt a request. A request keeps the blocks that its
    earlier placeholders took.
    """
    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    free = manager.block_pool.get_num_free_blocks()
    share = free // (len(groups) * len(scheduler.running) or 1)
    beside = 1 + scheduler.num_lookahead_tokens
    for group in groups:
        if group.block_size * share < most + beside:
            break
    else:
        return None
    limits = []
    for request in requests:
        blocks = ((g.block_size, g.req_to_blocks.get(request.request_id, ())) for g in groups)
        slots = min(size * (len(own) + share) for size, own in blocks)
        limits.append(max(min(most, slots - request.num_computed_tokens - beside), 0))
    return limits


def cut_placeholders(scheduler: Any, requests: Sequence[Any]) -> None:
    """Cut the placeholders, `spec_token_ids`, of running requests to what these can use."""
    most = most_in_step(scheduler, len(scheduler.running))
    most = min(scheduler.state.choice.num_drafts, most)
    in_cache = most_in_cache(scheduler, most, requests) or repeat(most)
    for request, limit in zip(requests, in_cache):
        drafts, params = request.spec_token_ids, request.sampling_params
        if params is not None and params.extra_args:
            limit = min(limit, request_budget(params, most))
        if request.structured_output_request is not None:
            limit = min(limit, scheduler.settings.max_grammar_tokens)
        if scheduler.runs_ahead:
            # vLLM counts each placeholder as a position. A step that may fill the model's length
            # would leave none, and the next step would have to wait for its output.
            known = request.num_computed_tokens - request.num_output_placeholders
            near_end = (scheduler.max_model_len - known) // 2 - 1
            if near_end < limit:
                limit = max(near_end, 0)
        if limit < len(drafts):
            # Make a new list: with async scheduling all requests share one list of placeholders.
            request.spec_token_ids = drafts[:limit]


def prompt_tokens(scheduler: Any, limit: int, prompts: Sequence[Any]) -> int:
    """Prompt tokens that the next step could take beside one of each request; stops at `limit`."""
    most = scheduler.scheduler_config.long_prefill_token_threshold or limit
    tokens = 0
    for request in scheduler.running:
        if request.is_prefill_chunk:
            left = request.num_tokens + request.num_output_placeholders
            tokens += min(max(left - request.num_computed_tokens - 1, 0), most)
    for request in prompts:
        if tokens >= limit:
            break
        # vLLM checks whether an unready request is ready only while the step has tokens left.
        rows = 1 if request.status in UNREADY else request.num_tokens - request.num_computed_tokens
        tokens += min(rows, most)
    return tokens


def waiting(scheduler: Any) -> list[Any]:
    """Requests that the next step may admit, in the order of vLLM's scheduler."""
    state, running = scheduler.state, len(scheduler.running)
    if state.blocked_for > 0 and state.blocked_at is not None and running >= state.blocked_at:
        return []
    most = scheduler.max_num_active_reqs - running
    others = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
    return [*islice(chain(scheduler.kv_holding_waiting, others), max(most, 0))]
