# SPDX-License-Identifier: Apache-2.0
"""Steps in which requests verify trees, before there is any request.

vLLM's dummy runs give each request as few rows as can be, so one request with a tree of 64 nodes is
no dummy run. These are requests made up as the scheduler would: one prompt token over a context
that counts as cached, then a step with draft tokens. Whatever real steps run, they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


class TreeSteps:
    """Runs steps of made-up requests on a ``GPUModelRunner``; every rank must run the same."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._pool = max(1, runner.kv_cache_config.num_blocks - 1)  # block 0 is vLLM's null block
        # Without a seed vLLM would draw one, and every later request would get another.
        self._params = SamplingParams(temperature=0.0, seed=0, max_tokens=runner.max_model_len)
        self._gone: set[str] = set()

    @contextmanager
    def as_asked(self) -> Iterator[TreeSteps]:
        """Verify all nodes that are asked for, as vLLM's own warm-up does; leave no request."""
        runner = self._runner
        manager, sampler = runner.adaptive_verification, runner.rejection_sampler
        adaptive = sampler.enable_adaptive_verification
        runner.adaptive_verification, sampler.enable_adaptive_verification = None, False
        try:
            yield self
            last = SchedulerOutput.make_empty()
            last.finished_req_ids = self._gone
            runner.execute_model(last)
        finally:
            runner.adaptive_verification = manager
            sampler.enable_adaptive_verification = adaptive

    def run(self, num_reqs: int, nodes: int, context_len: int) -> None:
        """Two steps, timed by the runner's ``step_timing`` where it collects.

        First a root each, over `context_len` cached tokens, and a draft; then the trees, `nodes`
        of each, and a draft. The time from the end of the forward pass to that of the draft stands
        as the drafter's.
        """
        names = [f"_bastion_{i}" for i in range(num_reqs)]
        prompt = [0] * (context_len + 1)
        root = self._step(dict.fromkeys(names, 1))
        root.finished_req_ids, self._gone = self._gone, set(names)
        tokens = context_len + 2 + nodes + self._runner.vllm_config.num_lookahead_tokens
        blocks = self._blocks(num_reqs, min(tokens, self._runner.max_model_len))
        root.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=self._params,
                pooling_params=None,
                block_ids=ids,
                num_computed_tokens=context_len,
                lora_request=None,
                prefill_token_ids=prompt,
            )
            for name, ids in zip(names, blocks, strict=True)
        ]
        self._execute(root)
        trees = self._step(dict.fromkeys(names, 1 + nodes))
        cached = trees.scheduled_cached_reqs = CachedRequestData.make_empty()
        cached.req_ids = names
        cached.num_computed_tokens = [context_len + 1] * num_reqs
        cached.num_output_tokens = [1] * num_reqs
        cached.new_block_ids = [None] * num_reqs
        trees.scheduled_spec_decode_tokens = {name: [0] * nodes for name in names}
        self._execute(trees)

    def _step(self, tokens: dict[str, int]) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_spec_tokens_to_schedule = self._runner.num_speculative_steps
        step.num_scheduled_tokens = tokens
        step.total_num_scheduled_tokens = sum(tokens.values())
        return step

    def _execute(self, step: SchedulerOutput) -> None:
        runner = self._runner
        runner.execute_model(step)
        runner.step_timing.forward_end()
        runner.step_timing.drafter_start()
        runner.sample_tokens(None)
        runner.step_timing.drafter_end()

    def _blocks(self, num_reqs: int, tokens: int) -> list[tuple[list[int], ...]]:
        """Block ids by KV-cache group for each request; shared where the cache is too small."""
        groups = self._runner.kv_cache_config.kv_cache_groups
        counts = [cdiv(tokens, group.kv_cache_spec.block_size) for group in groups]
        out, start = [], 0
        for _ in range(num_reqs):
            ids = []
            for count in counts:
                ids.append([1 + (start + i) % self._pool for i in range(count)])
                start += count
            out.append(tuple(ids))
        return out
