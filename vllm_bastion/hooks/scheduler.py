# SPDX-License-Identifier: Apache-2.0
"""The schedulers of method "bastion", subclasses of vLLM's: what is scheduled and counted.

vLLM schedules K placeholders for every request, `num_spec_tokens_to_schedule`, and hands K to the
drafter. The gate decides whether a step drafts and how (`scheduler.gate`); here K becomes 0, or
what the step, the graphs and the KV cache have room for. The worker verifies at most K nodes of a
request, and reports how many with the step's output. Grammars are in `hooks.grammar`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from time import perf_counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_bastion import envs
from vllm_bastion.attached import StepPlan, StepReport
from vllm_bastion.config import BastionSpeculativeConfig, request_budget
from vllm_bastion.hooks.grammar import GrammarScheduler, attach_plan
from vllm_bastion.hooks.telemetry import collect, log_whole_run, send
from vllm_bastion.scheduler.gate import Arm, Gate
from vllm_bastion.scheduler.state import LastStep, SchedulerState

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
        self.state = SchedulerState(Gate(_arms(self, self.settings)))

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
        The gate learns what the step took and emitted.
        """
        report = StepReport.find(model_runner_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:
            report = StepReport.of(model_runner_output)
        if report is None:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            send(self, self.state, outputs)
            return outputs
        verified = report.num_verified
        # Nodes that a grammar rejected before verification are already counted.
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = {
            request_id: max(len(tokens) - verified.get(request_id, 0), invalid.get(request_id, 0))
            for request_id, tokens in drafts.items()
        }
        _observe(self.state, scheduler_output, model_runner_output, perf_counter())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if envs.telemetry():
            collect(self, self.state, scheduler_output, report, outputs)
            send(self, self.state, outputs)
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
        """Let the gate decide what the step ends with: K placeholders for the next step.

        K is vLLM's `dynamic_sd_lookup` of any number of requests. With such a list vLLM also
        neither pads a new request to 1 + N rows nor lets it wait until there is room for them.
        """
        state = self.state
        _cut_placeholders(self, state, self.settings)
        waited = any(request.status not in _UNREADY for request in _waiting(self))
        plan = _plan(self, state, self.settings)
        self.dynamic_sd_lookup = Always(state.num_drafts)
        output = super().schedule(throttle_prefills)
        tokens_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        state.blocked_for -= 1
        if output.scheduled_new_reqs:
            state.blocked_at = None
        elif waited and tokens_left and self.scheduler_config.prefill_schedule_interval <= 1:
            # The requests most likely wait for the KV cache, until another one leaves. With a
            # longer interval vLLM holds them back in most steps.
            state.blocked_at, state.blocked_for = len(self.running), _BLOCKED_FOR
        attach_plan(self, output, plan)
        return output

    def shutdown(self) -> None:
        """Log what the whole run drafted."""
        log_whole_run(self.state)
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


def _observe(state: SchedulerState, scheduled: Any, output: Any, now: float) -> None:
    """Let the gate observe a step whose output has arrived at `now`."""
    plan, last = StepPlan.of(scheduled), state.last
    reqs = len(scheduled.num_scheduled_tokens)
    nodes = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    if scheduled.total_num_scheduled_tokens != reqs + nodes:  # prompts
        state.last = LastStep(now, None)
        return
    tokens = sum(map(len, output.sampled_token_ids))
    clean = last.arm == plan.arm == plan.verified
    ms = (now - last.time) * 1e3 if clean else 0.0
    state.gate.observe(plan.verified, reqs, tokens, ms)
    state.last = LastStep(now, plan.arm, ms)


class Always(list[int]):
    """vLLM's table of drafts by number of requests, with one value for all of them."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__((num_drafts,))

    def __getitem__(self, num_reqs: Any) -> Any:
        return super().__getitem__(0)


def _arms(scheduler: Any, spec_config: BastionSpeculativeConfig) -> tuple[Arm, ...]:
    """What the engine's steps may end with."""
    parallel = scheduler.vllm_config.parallel_config
    experts = scheduler.vllm_config.model_config.is_moe
    if spec_config.bastion_budget == 0:
        return (Arm.PLAIN,)
    if spec_config.bastion_budget != "adaptive" or (parallel.data_parallel_size > 1 and experts):
        # Data-parallel ranks of experts step together, and each has a scheduler of its own. vLLM
        # switches dynamic drafting off there, too.
        return (Arm.TREE,)
    ngram = (Arm.NGRAM,) if spec_config.bastion_lookup else ()
    return (Arm.PLAIN, *ngram, Arm.TREE)


def _plan(scheduler: Any, state: SchedulerState, spec_config: BastionSpeculativeConfig) -> StepPlan:
    """Decide what the step that is being scheduled ends with, and K."""
    gate, verified, reason = state.gate, state.arm, state.reason
    reqs = len(scheduler.running) + len(scheduler.waiting)
    reqs = max(min(reqs, scheduler.max_num_running_reqs), 1)
    arm, num_drafts = Arm.PLAIN, _most_in_step(scheduler, spec_config, reqs)
    num_drafts = max(_most_in_cache(scheduler, num_drafts), default=num_drafts)
    room = scheduler.max_num_scheduled_tokens - reqs
    prompts_wait = room <= 0 or _prompt_tokens(scheduler, room) >= room
    if prompts_wait:
        state.reason = "prompts wait"
    elif not _wants_drafts(scheduler, spec_config):
        state.reason = "no request can use drafts"
    elif num_drafts == 0:
        state.reason = "no room for drafts"
    else:
        arm, state.reason = gate.choose(reqs), gate.reason
    state.arm, state.num_drafts = arm, 0 if arm == Arm.PLAIN else num_drafts
    return StepPlan(
        arm=arm,
        verified=verified,
        reason=reason,
        step_ms=gate.ms(verified, reqs),
        ngram_tokens=gate.ngram_tokens(reqs),
        prompts_wait=prompts_wait,
    )


def _wants_drafts(scheduler: Any, spec_config: BastionSpeculativeConfig) -> bool:
    """Whether a request may have nodes in the next step and emit more than one token there."""
    most = spec_config.num_speculative_tokens
    # Without running requests the first prompts are scheduled now.
    return not scheduler.running or any(
        request_budget(request.sampling_params, most) > 0
        and request.max_tokens - request.num_output_tokens > 2
        for request in scheduler.running
    )


def _most_in_step(scheduler: Any, spec_config: BastionSpeculativeConfig, reqs: int) -> int:
    """As many nodes of each request as a step and the largest graph have room for.

    A step beyond the largest graph takes several times as long on an H100.
    """
    most = spec_config.num_speculative_tokens
    if spec_config.bastion_budget != "adaptive":
        most = min(most, max(int(spec_config.bastion_budget), 1))
    compilation = scheduler.vllm_config.compilation_config
    rows = scheduler.max_num_scheduled_tokens
    if compilation.cudagraph_mode.has_full_cudagraphs():
        rows = min(rows, compilation.max_cudagraph_capture_size or rows)
    return max(min(most, rows // reqs - 1), 0)


def _most_in_cache(scheduler: Any, most: int) -> list[int]:
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


def _cut_placeholders(
    scheduler: Any, state: SchedulerState, spec_config: BastionSpeculativeConfig
) -> None:
    """Cut each running request's placeholders, `spec_token_ids`, to what it can use."""
    most, runs_ahead = state.num_drafts, isinstance(scheduler, AsyncScheduler)
    if scheduler.running:
        most = min(most, _most_in_step(scheduler, spec_config, len(scheduler.running)))
    for request, in_cache in zip(scheduler.running, _most_in_cache(scheduler, most), strict=True):
        count = len(request.spec_token_ids)
        if not count:
            continue
        limit = min(count, in_cache, request_budget(request.sampling_params, most))
        if request.use_structured_output:
            limit = min(limit, spec_config.max_grammar_tokens)
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


def _prompt_tokens(scheduler: Any, limit: int) -> int:
    """Tokens that prompts could use next beside one of each request, counted up to `limit`."""
    most = scheduler.scheduler_config.long_prefill_token_threshold or limit
    left = (
        request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        for request in scheduler.running
        if not request.spec_token_ids
    )
    # One in plain decoding; none, or fewer, while a step is in flight.
    tokens = sum(min(max(tokens - 1, 0), most) for tokens in left)
    for request in _waiting(scheduler):
        if tokens >= limit:
            break
        # vLLM looks whether an unready one has become ready only while tokens are left.
        rows = 1 if request.status in _UNREADY else request.num_tokens - request.num_computed_tokens
        tokens += min(rows, most)
    return tokens


def _waiting(scheduler: Any) -> Iterator[Any]:
    """Requests that may come in, in the order in which vLLM's scheduler takes them."""
    state = scheduler.state
    running = len(scheduler.running)
    if state.blocked_for > 0 and state.blocked_at is not None and running >= state.blocked_at:
        return iter(())
    seats = scheduler.max_num_active_reqs - running
    others = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
    return islice(chain(scheduler.kv_holding_waiting, others), max(seats, 0))
