# SPDX-License-Identifier: Apache-2.0
"""Steps that verify trees, run before the first request.

vLLM's dummy runs distribute rows over as many requests as possible, so they cannot run one request
with a tree of 64 nodes. Here artificial requests are scheduled as real ones would be: a step with
one prompt token, whose context counts as cached, then a step with draft tokens. They run the same
code as real steps, but every row gets a token of its own: requests with one prompt would have equal
trees, and in a mixture of experts the same few experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.policy.cost.timing import new_mark

# vLLM stages a request's blocks, tokens and parameters in host memory that the device reads, and
# reuses that memory two steps later (`buffer_utils.UvaBufferPool`). Its engine has at most two
# steps in flight; with a third, the device would write to blocks of the wrong step.
_IN_FLIGHT = 2


class TreeSteps:
    """Runs artificial requests on a ``GPUModelRunner``. Every rank must run the same steps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._pool = max(1, runner.kv_cache_config.num_blocks - 1)  # block 0 is vLLM's null block
        # Without a seed vLLM would draw one, which would change the seeds of all later requests.
        self._params = SamplingParams(temperature=0.0, seed=0, max_tokens=runner.max_model_len)
        self._finished: set[str] = set()
        self._running: deque[Any] = deque()

    @contextmanager
    def untrimmed(self) -> Iterator[TreeSteps]:
        """Verify all scheduled nodes, as in vLLM's warm-up. No request is left at the end.

        KV connectors are disabled meanwhile: only the scheduler can tell one what to save.
        """
        runner, runtime = self._runner, runtime_of(self._runner.vllm_config)
        manager, sampler = runner.adaptive_verification, runner.rejection_sampler
        adaptive = sampler.enable_adaptive_verification
        runner.adaptive_verification, sampler.enable_adaptive_verification = None, False
        runner.kv_connector.set_disabled(True)
        runtime.timed_spares = 0
        try:
            yield self
            last = SchedulerOutput.make_empty()
            last.finished_req_ids = self._finished
            runner.execute_model(last)
            self._wait(0)
        finally:
            runtime.timed_spares = None
            runner.kv_connector.set_disabled(False)
            runner.adaptive_verification = manager
            sampler.enable_adaptive_verification = adaptive

    def run(self, num_reqs: int, nodes: int, context_len: int, *, wait: bool = False) -> None:
        """Run two steps, which the runner's ``step_timing`` times if it collects.

        The first one decodes a root of each request and drafts; the second one verifies the trees
        and drafts. The drafter's time is that from the end of the forward pass to the end of the
        draft.

        Args:
            num_reqs: requests.
            nodes: nodes of each request's tree.
            context_len: cached tokens of each request.
            wait: let the device finish the first step before the second one begins.
        """
        names = [f"_bastion_{i}" for i in range(num_reqs)]
        prompt = [0] * (context_len + 1)
        root = self._step(dict.fromkeys(names, 1))
        root.finished_req_ids, self._finished = self._finished, set(names)
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
        if wait:
            torch.accelerator.synchronize()
        self._execute(trees)

    def _step(self, tokens: dict[str, int]) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_spec_tokens_to_schedule = self._runner.num_speculative_steps
        step.num_scheduled_tokens = tokens
        step.total_num_scheduled_tokens = sum(tokens.values())
        return step

    def _wait(self, most: int) -> None:
        """Wait until at most `most` steps are in flight."""
        while len(self._running) > most:
            self._running.popleft().synchronize()

    def _execute(self, step: SchedulerOutput) -> None:
        runner = self._runner
        self._wait(_IN_FLIGHT - 1)
        runner.execute_model(step)
        runner.step_timing.forward_end()
        runner.step_timing.drafter_start()
        runner.sample_tokens(None)
        runner.step_timing.drafter_end()
        self._running.append(new_mark(runner.device))
        self._running[-1].record()

    def _blocks(self, num_reqs: int, tokens: int) -> list[tuple[list[int], ...]]:
        """Block ids by KV-cache group for each request; reused if the cache is too small."""
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
