# SPDX-License-Identifier: Apache-2.0
"""The schedulers of method "bastion", subclasses of vLLM's: what is scheduled and counted.

vLLM schedules N placeholders for every request. The worker verifies fewer nodes, and reports how
many with the step's output. Placeholders count against the step's token limit: with N for each of
many requests, some requests and all prompts would have to wait. So requests share the tokens that
roots and prompts leave, and get none while nothing is drafted. While prompts can fill the next
step, the worker is told not to draft. Grammars are in `hooks.grammar`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_bastion.carriers import RequestState, SchedulerState, StepPlan, StepReport
from vllm_bastion.config import BastionSpeculativeConfig, request_budget
from vllm_bastion.hooks.grammar import GrammarScheduler, attach_plan
from vllm_bastion.hooks.telemetry import collect, log_whole_run

# Requests that wait for something other than tokens and the KV cache.
_UNREADY = (
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
)
# Steps for which requests that did not come in are believed to wait for the KV cache.
_BLOCKED_FOR = 32


class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's per-step statistics for trees: positions are depths, draft tokens are nodes."""

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified tree of `num_draft_tokens` nodes."""
        within_depths = min(num_draft_tokens, self.num_spec_tokens)
        super().observe_draft(within_depths, num_accepted_tokens)
        self.num_draft_tokens += num_draft_tokens - within_depths


class TreeRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request: drafted tokens are nodes, and the histogram is over depths."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a step of the request, unless it verified none of its nodes."""
        if num_draft_tokens > 0:
            super().observe(num_draft_tokens, num_accepted, detailed)


class TreeScheduler(GrammarScheduler):
    """What both schedulers have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.dynamic_sd_lookup is None:  # type: ignore[has-type]
            # The list always says N. With it, vLLM neither pads a new request to 1 + N rows nor
            # lets it wait until there is room for them.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def add_request(self, request: Any) -> None:
        """Let `--per-request-spec-decode-metrics` count trees."""
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = TreeRequestMetrics.new(self.settings.max_chain_tokens)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """Start a step's statistics with one entry per depth in place of one per node.

        A request without a verified node had no draft, whatever was scheduled for it.
        """
        unverified = (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_draft_tokens <= unverified:
            return spec_decoding_stats
        if spec_decoding_stats is None and self.log_stats:
            spec_decoding_stats = TreeSpecDecodingStats.new(self.settings.tree_depth)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Turn nodes scheduled but not verified into vLLM's `num_invalid_spec_tokens`.

        vLLM subtracts these from the draft tokens it counts, for the engine and for the request.
        The number of verified nodes also determines the placeholders of the next steps.
        """
        from vllm_bastion.policy.shares import next_wanted

        report = StepReport.find(model_runner_output)
        if scheduler_output.scheduled_spec_decode_tokens:
            report = StepReport.of(model_runner_output)
        if report is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        longest, verified, state = 0, report.num_verified, SchedulerState.ensure(self)
        state.drafting = report.drafting
        state.times += report.times
        for request_id in scheduler_output.scheduled_spec_decode_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                longest = max(longest, request.num_tokens)
                wanted = next_wanted(verified.get(request_id, 0), self.settings.bastion_gamma)
                RequestState.ensure(request).wanted_placeholders = wanted
        # Nodes that a grammar rejected before verification are already counted.
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = {
            request_id: max(len(tokens) - verified.get(request_id, 0), invalid.get(request_id, 0))
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if report.step is not None:
            collect(self, state, report.step, longest, outputs)
        return outputs

    def _handle_stopped_request(self, request: Any) -> bool:
        """Count no token after a stop as computed: connectors send that many tokens' cache.

        A recurrent state cannot be rolled back, so there all tokens count.
        """
        if not self.has_mamba_layers:
            computed = request.num_computed_tokens - request.num_output_placeholders
            # The last token is computed in the next step.
            request.num_computed_tokens = min(computed, request.num_tokens - 1)
            request.num_output_placeholders = 0
        return super()._handle_stopped_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Give every request its share of placeholders; vLLM gives each of them N."""
        state = SchedulerState.ensure(self)
        _share_out(self, self.settings)
        _leave_blocks(self)
        waited = any(request.status not in _UNREADY for request in _waiting(self))
        output = super().schedule(throttle_prefills)
        tokens_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        state.blocked_for -= 1
        if output.scheduled_new_reqs:
            state.blocked_at = None
        elif waited and tokens_left and self.scheduler_config.prefill_schedule_interval <= 1:
            # The requests most likely wait for the KV cache, until another one leaves. With a
            # longer interval vLLM holds them back in most steps.
            state.blocked_at, state.blocked_for = len(self.running), _BLOCKED_FOR
        room = self.max_num_scheduled_tokens - len(self.running)
        backlog = room <= 0 or _prompt_tokens(self, room) >= room
        times, state.times = state.times, []
        attach_plan(self, output, StepPlan(backlog=backlog, times=times))
        return output

    def shutdown(self) -> None:
        """Log what the whole run drafted."""
        log_whole_run(SchedulerState.ensure(self))
        super().shutdown()


class BastionScheduler(TreeScheduler):
    """Schedules a step once the output of the last one has arrived."""

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Cache the blocks that the emitted tokens fill, before vLLM frees any of them.

        vLLM caches in the next step, after freeing the recurrent states that this step left
        behind, and not at all when the request ends. Its asynchronous scheduler caches here.
        """
        running = request.status == RequestStatus.RUNNING
        result = super()._update_request_with_output(request, new_token_ids, is_stale)
        if running:
            # The last token is computed in the next step.
            known = min(request.num_tokens - 1, request.num_computed_tokens)
            self.kv_cache_manager.cache_blocks(request, known)
        return result


class BastionAsyncScheduler(TreeScheduler, AsyncScheduler):
    """Schedules a step before the output of the last one has arrived."""


def _share_out(scheduler: Any, spec_config: BastionSpeculativeConfig) -> None:
    """Cut the placeholders of the running requests, `spec_token_ids`, to their shares."""
    from vllm_bastion.policy.shares import share_placeholders

    runs_ahead = isinstance(scheduler, AsyncScheduler)
    decodes = [request for request in scheduler.running if request.spec_token_ids]
    if not SchedulerState.ensure(scheduler).drafting:
        for request in decodes:
            request.spec_token_ids = []
        return
    max_drafts = spec_config.num_speculative_tokens
    if spec_config.bastion_budget != "adaptive":
        max_drafts = min(max_drafts, max(spec_config.bastion_budget, 1))
    max_with_grammar = min(max_drafts, spec_config.max_grammar_tokens)
    limits = np.array(
        [
            min(
                len(r.spec_token_ids),
                max_with_grammar if r.use_structured_output else max_drafts,
                request_budget(r.sampling_params, max_drafts),
                _most_near_the_end(r, scheduler.max_model_len) if runs_ahead else max_drafts,
            )
            for r in decodes
        ],
        dtype=np.int32,
    )
    wanted = np.array([_wanted(request, max_drafts) for request in decodes], dtype=np.int32)
    tokens = scheduler.max_num_scheduled_tokens - len(decodes)
    shares = share_placeholders(tokens, wanted, limits, _prompt_tokens(scheduler, tokens))
    for request, share in zip(decodes, shares.tolist(), strict=True):
        if share < len(request.spec_token_ids):
            # Make a new list: with async scheduling all requests share one list of placeholders.
            request.spec_token_ids = request.spec_token_ids[:share]


def _most_near_the_end(request: Any, max_model_len: int) -> int:
    """Most placeholders of a request that leave its next step as many positions.

    vLLM counts each placeholder as a position. A step that may fill the model's length would leave
    none, and with async scheduling the next step would have to wait for its output.
    """
    known: int = request.num_computed_tokens - request.num_output_placeholders
    return max((max_model_len - known) // 2 - 1, 0)


def _leave_blocks(scheduler: Any) -> None:
    """Cut placeholders whose KV blocks another running request needs for its own next tokens.

    vLLM would preempt a request for such placeholders. Those that fit into a request's own blocks
    stay.
    """
    if not any(request.spec_token_ids for request in scheduler.running):
        return
    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    lookahead, limit = scheduler.num_lookahead_tokens, scheduler.max_num_scheduled_tokens
    free, running = manager.block_pool.get_num_free_blocks(), len(scheduler.running)
    most = limit + running * lookahead
    if free >= sum(most // group.block_size + 2 * running for group in groups):
        return

    def missing(request: Any, drafts: int) -> int:
        """Blocks that the request's next step lacks, non-decreasing in its placeholders."""
        tokens = request.num_tokens + request.num_output_placeholders
        tokens = min(tokens, request.num_computed_tokens + limit) + drafts + lookahead
        tokens, name = min(tokens, scheduler.max_model_len), request.request_id
        lacks = (-(-tokens // g.block_size) - len(g.req_to_blocks.get(name, ())) for g in groups)
        return sum(max(lack, 0) for lack in lacks)

    lacking = [missing(request, 0) for request in scheduler.running]
    free -= sum(lacking)
    for request, without in zip(scheduler.running, lacking, strict=True):
        wanted = len(request.spec_token_ids)
        if not wanted:
            continue
        room = without + max(free, 0)
        drafts = wanted
        if missing(request, wanted) > room:
            fits = range(wanted)
            drafts = bisect_right(fits, room, key=lambda n: missing(request, n)) - 1
            request.spec_token_ids = request.spec_token_ids[:drafts]
        free -= missing(request, drafts) - without


def _wanted(request: Any, max_drafts: int) -> int:
    state = RequestState.find(request)
    known = None if state is None else state.wanted_placeholders
    return max_drafts if known is None else known


def _prompt_tokens(scheduler: Any, limit: int) -> int:
    """Tokens that requests without placeholders could use next, counted up to `limit`."""
    most = scheduler.scheduler_config.long_prefill_token_threshold or limit
    left = (
        request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        for request in scheduler.running
        if not request.spec_token_ids
    )
    # Negative while a step with drafts is in flight.
    tokens = sum(min(max(tokens, 0), most) for tokens in left)
    for request in _waiting(scheduler):
        if tokens >= limit:
            break
        # vLLM looks whether an unready one has become ready only while tokens are left.
        rows = 1 if request.status in _UNREADY else request.num_tokens - request.num_computed_tokens
        tokens += min(rows, most)
    return tokens


def _waiting(scheduler: Any) -> Iterator[Any]:
    """Requests that may come in, in the order in which vLLM's scheduler takes them."""
    state = SchedulerState.ensure(scheduler)
    running = len(scheduler.running)
    if state.blocked_for > 0 and state.blocked_at is not None and running >= state.blocked_at:
        return iter(())
    seats = scheduler.max_num_active_reqs - running
    others = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
    return islice(chain(scheduler.kv_holding_waiting, others), max(seats, 0))
