# SPDX-License-Identifier: Apache-2.0
"""The schedulers of method "bastion", subclasses of vLLM's: what is scheduled and counted.

vLLM schedules K placeholders for every request, `num_spec_tokens_to_schedule`, and hands K to the
drafter. The gate decides whether a step drafts and how (`scheduler.gate`); here K becomes 0, or
what the step, the graphs and the KV cache have room for. The worker verifies at most K nodes of a
request, and reports how many with the step's output. Grammars are in `hooks.grammar`.
"""

from __future__ import annotations

import sys
from itertools import repeat
from operator import attrgetter, sub
from secrets import token_bytes
from time import perf_counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_bastion import envs
from vllm_bastion.attached import StepPlan, StepReport
from vllm_bastion.hooks.grammar import GrammarScheduler
from vllm_bastion.hooks.slots import (
    UNREADY,
    cut_placeholders,
    most_in_cache,
    most_in_step,
    prompt_tokens,
    waiting,
    wants_drafts,
)
from vllm_bastion.hooks.telemetry import TreeRequestMetrics, record_of, send
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.scheduler.gate import Arm, Gate, size_class
from vllm_bastion.scheduler.state import Choice, SchedulerState
from vllm_bastion.telemetry.text import interval_line

logger = init_logger(__name__)

# Steps for which requests that were not admitted are assumed to wait for the KV cache.
_BLOCKED_FOR = 32
_NOTHING = StepReport({})  # of a step without draft slots
_TOKENS = attrgetter("new_token_ids")


class TreeScheduler(GrammarScheduler):
    """What both schedulers have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state = SchedulerState(Gate(_arms(self)))
        self.records, self.depth = envs.telemetry(), self.settings.tree_depth
        self.runs_ahead = isinstance(self, AsyncScheduler)
        # Whether the worker sees the sampled tokens before it drafts, and may take a simpler arm.
        self.sees_tokens = not current_host().runs_ahead
        # Most nodes of a request, and most rows of a step: those of the largest FULL graph.
        self.most_nodes, budget = self.settings.num_speculative_tokens, self.settings.bastion_budget
        if budget != "adaptive":
            self.most_nodes = min(self.most_nodes, max(budget, 1))
        compilation, self.graph_rows = self.vllm_config.compilation_config, sys.maxsize
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.graph_rows = compilation.max_cudagraph_capture_size or sys.maxsize

    def add_request(self, request: Any) -> None:
        """Let `--per-request-spec-decode-metrics` count trees."""
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = TreeRequestMetrics.new(self.settings.max_chain_tokens)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Hide all earlier replies from new requests, too."""
        self.state.ngram_key = token_bytes(32)
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """Count a tree in a step's statistics: positions are depths, and draft tokens are nodes.

        A request without a verified node had no draft, whatever was scheduled for it.
        """
        nodes = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if nodes <= 0 or not self.log_stats:
            return spec_decoding_stats
        stats = spec_decoding_stats or SpecDecodingStats.new(self.depth)
        stats.num_drafts += 1
        stats.num_draft_tokens += nodes
        stats.num_accepted_tokens += num_accepted_tokens
        for i in range(num_accepted_tokens):
            stats.num_accepted_tokens_per_pos[i] += 1
        for i in range(nodes if nodes < self.depth else self.depth):
            stats.num_draft_tokens_per_pos[i] += 1
        return stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Turn nodes scheduled but not verified into vLLM's `num_invalid_spec_tokens`.

        vLLM subtracts these from the draft tokens it counts, for the engine and for the request.
        The gate learns what the step took and emitted.
        """
        drafts, report = scheduler_output.scheduled_spec_decode_tokens, _NOTHING
        if drafts:
            report = StepReport.of(model_runner_output)
            nodes = map(report.num_verified.get, drafts, repeat(0))
            unverified = dict(zip(drafts, map(sub, map(len, drafts.values()), nodes)))
            # Nodes that a grammar rejected before verification are already counted.
            for name, count in (scheduler_output.num_invalid_spec_tokens or {}).items():
                unverified[name] = max(unverified.get(name, 0), count)
            scheduler_output.num_invalid_spec_tokens = unverified
        ran, now = scheduler_output.total_num_scheduled_tokens > 0, perf_counter()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if ran:
            plan = StepPlan.of(scheduler_output)
            # Tokens past a reply's end do not count.
            given = [one for own in outputs.values() for one in own.outputs if one.new_token_ids]
            tokens = sum(map(len, map(_TOKENS, given)))
            self.state.observe(scheduler_output, plan, tokens, report.predicted_ms, now)
            if self.records:
                self.state.collector.add(record_of(self, plan, report, given, tokens))
        if self.records:
            send(self, outputs)
        return outputs

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Add tokens that cannot end the reply at once: vLLM adds and checks one after another."""
        count = len(new_token_ids)
        if _may_stop(request, new_token_ids, count, self.max_model_len):
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        request.append_output_token_ids(new_token_ids)
        if self.runs_ahead and not is_stale:
            request.num_output_placeholders -= count
        super()._update_request_with_output(request, [], is_stale)
        return new_token_ids, False

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
        """Let the gate decide what the step ends with, and so K, the next step's draft slots.

        vLLM reads K from `dynamic_sd_lookup`, for any batch size. With such a list it also neither
        pads a new request to 1 + N rows nor makes it wait until a step can hold them.
        """
        state, verified = self.state, self.state.choice
        if with_slots := [request for request in self.running if request.spec_token_ids]:
            cut_placeholders(self, with_slots)
        # Requests of the next step, waiting ones included.
        reqs, prompts, waited = len(self.running), list[Any](), False
        if len(self.requests) != reqs:
            prompts = waiting(self)
            waited = any(request.status not in UNREADY for request in prompts)
            reqs = min(reqs + len(self.waiting), self.max_num_running_reqs)
        reqs = reqs or 1
        choice = _choose(self, reqs, prompts)
        plan = StepPlan(
            arm=choice.arm,
            verified=verified.arm,
            reason=verified.reason,
            ngram_tokens=state.gate.ngram_tokens(reqs) if self.sees_tokens else None,
            prompts_wait=choice.prompts_wait,
        )
        if verified.num_drafts:
            plan.line = state.lines[size_class(reqs), verified.arm]()
            if self.settings.bastion_latency_model != "profile":
                plan.step_ms = state.gate.costs(reqs).get(verified.arm)
        self.dynamic_sd_lookup = [choice.num_drafts] * (1 + self.max_num_running_reqs)
        output = super().schedule(throttle_prefills)
        if output.total_num_scheduled_tokens:  # else the worker runs no step
            state.choice = choice
        tokens_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        state.blocked_for -= 1
        if output.scheduled_new_reqs:
            state.blocked_at = None
        elif waited and tokens_left and self.scheduler_config.prefill_schedule_interval <= 1:
            # They most likely wait for the KV cache, until another request leaves. With a longer
            # interval vLLM holds them back in most steps.
            state.blocked_at, state.blocked_for = len(self.running), _BLOCKED_FOR
        if self.settings.bastion_ngram_cache:
            for new in output.scheduled_new_reqs:
                request, adapter = self.requests[new.req_id], new.lora_request
                name = None if adapter is None else adapter.lora_name
                group = state.ngram_group(request.cache_salt, name)
                plan.ngram_groups[new.req_id] = group
        plan.attach(output)
        return output

    def shutdown(self) -> None:
        """Log what the whole run drafted, or why it did not: offline there is no periodic line."""
        line = interval_line(self.state.collector.whole(), None, "Bastion, the whole run")
        if line is not None:
            logger.info(line)
        super().shutdown()


class BastionScheduler(TreeScheduler):
    """Schedules a step after the output of the last one has arrived."""

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


def _may_stop(request: Any, tokens: list[int], count: int, max_model_len: int) -> bool:
    """Whether one of `count` tokens may end the request's reply, see vLLM's `check_stop`."""
    params, emitted = request.sampling_params, request.num_output_tokens + count
    stops = params.stop_token_ids
    return (
        emitted >= request.max_tokens
        or request.num_prompt_tokens + emitted >= max_model_len
        or params.eos_token_id in tokens
        or (bool(stops) and not set(stops).isdisjoint(tokens))
        or params.repetition_detection is not None
    )


def _arms(scheduler: Any) -> tuple[Arm, ...]:
    """The arms that the gate chooses from."""
    config, spec_config = scheduler.vllm_config, scheduler.settings
    several = config.parallel_config.data_parallel_size > 1
    if spec_config.bastion_budget == 0:
        return (Arm.PLAIN,)
    if spec_config.bastion_budget != "adaptive" or (several and config.model_config.is_moe):
        # Data-parallel ranks of a MoE model step together, but each has its own scheduler. vLLM
        # switches dynamic drafting off there, too.
        return (Arm.TREE,)
    ngram = (Arm.NGRAM,) if spec_config.bastion_lookup else ()
    return (Arm.PLAIN, *ngram, Arm.TREE)


def _choose(scheduler: Any, reqs: int, prompts: list[Any]) -> Choice:
    """What a step that is being scheduled for so many requests ends with."""
    num_drafts = most_in_step(scheduler, reqs)
    in_cache = most_in_cache(scheduler, num_drafts, scheduler.running)
    num_drafts = num_drafts if in_cache is None else max(in_cache, default=num_drafts)
    free = scheduler.max_num_scheduled_tokens - reqs
    free = free if free > 0 else 1
    if prompt_tokens(scheduler, free, prompts) >= free:
        return Choice(Arm.PLAIN, "prompts wait", prompts_wait=True)
    if not wants_drafts(scheduler):
        return Choice(Arm.PLAIN, "no request can use drafts")
    if num_drafts == 0:
        return Choice(Arm.PLAIN, "no room for drafts")
    gate = scheduler.state.gate
    arm = gate.choose(reqs)
    return Choice(arm, gate.reason, 0 if arm == Arm.PLAIN else num_drafts)
