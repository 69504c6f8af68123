# SPDX-License-Identifier: Apache-2.0
"""What is scheduled beside trees: our schedulers, without a model."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks import TINY
from vllm_bastion import plugin
from vllm_bastion.attached import StepReport
from vllm_bastion.hooks.scheduler import BastionAsyncScheduler, BastionScheduler, TreeScheduler
from vllm_bastion.scheduler.gate import Arm, Gate

NODES, ROWS, BLOCKS = 64, 128, 4096


class Loop:
    """A scheduler, and a runner that accepts no draft token."""

    def __init__(
        self, kind: type[TreeScheduler], max_model_len: int = 1024, blocks: int = BLOCKS
    ) -> None:
        plugin.register()
        settings = {"method": "bastion", "model": str(TINY / "drafter")}
        config = EngineArgs(
            model=str(TINY / "target"), max_num_seqs=8, max_model_len=max_model_len,
            block_size=16, max_num_batched_tokens=ROWS, enable_prefix_caching=False,
            speculative_config=settings | {"num_speculative_tokens": NODES},
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec([name], spec) for name in ("target", "drafter")]
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
        )
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._ahead = int(kind is BastionAsyncScheduler)

    def add(self, name: str, max_tokens: int = 3) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(range(1, 21)), params, None)
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedule a step, and hand in the output of the one that has ended."""
        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[n].is_prefill_chunk else [7] for n in names]
        output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens)
        verified = {n: len(drafts) for n, drafts in step.scheduled_spec_decode_tokens.items()}
        StepReport(verified).attach(output)
        self._in_flight.append((step, output))
        if len(self._in_flight) > self._ahead:
            self.scheduler.update_from_output(*self._in_flight.popleft())
            if not self._ahead:
                count = step.num_spec_tokens_to_schedule
                # Trees of a grammar need its back end.
                running = self.scheduler.running
                names = [r.request_id for r in running if not r.use_structured_output]
                drafts = DraftTokenIds(names, [[-1] * count for _ in names])
                self.scheduler.update_draft_token_ids(drafts)
        return step

    def comes_in(self, name: str) -> bool:
        """Whether the request has rows within 40 steps; the others take 300."""
        return any(name in self.step().num_scheduled_tokens for _ in range(40))


@pytest.fixture(params=[BastionScheduler, BastionAsyncScheduler])
def loop(request: pytest.FixtureRequest) -> Loop:
    """Four requests decode with trees whose placeholders could fill every step."""
    loop = Loop(request.param)
    loop.scheduler.state.gate = Gate((Arm.TREE,))
    for name in "abcd":
        loop.add(name, 300)
    steps = [loop.step() for _ in range(6)]
    assert sum(steps[-1].num_scheduled_tokens.values()) == ROWS
    return loop


def test_a_new_request(loop: Loop) -> None:
    loop.add("new")
    assert loop.comes_in("new")


def test_a_request_whose_grammar_was_compiled_meanwhile(loop: Loop) -> None:
    request: Any = loop.add("grammar")
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
    for _ in range(3):
        loop.step()
    request.structured_output_request.grammar = SimpleNamespace(
        accept_tokens=lambda *_: True, is_terminated=lambda: False
    )
    assert loop.comes_in("grammar")


def test_a_request_that_came_during_a_pause(loop: Loop) -> None:
    loop.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    loop.add("new")
    for _ in range(3):
        loop.step()
    loop.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert loop.comes_in("new")


@pytest.mark.parametrize("kind", [BastionScheduler, BastionAsyncScheduler])
def test_steps_follow_each_other_up_to_the_models_length(kind: type[TreeScheduler]) -> None:
    loop = Loop(kind, max_model_len=2 * NODES)
    request = loop.add("long", max_tokens=2 * NODES)
    nodes = []
    while request.num_tokens < loop.scheduler.max_model_len - 2:
        step = loop.step()
        assert step.total_num_scheduled_tokens > 0
        nodes.append(len(step.scheduled_spec_decode_tokens.get("long", ())))
    assert max(nodes) > NODES // 2 and nodes[-1] < 4


@pytest.mark.parametrize("kind", [BastionScheduler, BastionAsyncScheduler])
def test_placeholders_preempt_no_request(kind: type[TreeScheduler]) -> None:
    """Two requests of 20 + 100 tokens, in a cache that holds these and what the drafter writes."""
    loop = Loop(kind, blocks=2 * 2 * (120 + 2 * 16) // 16)
    loop.scheduler.state.gate = Gate((Arm.TREE,))
    requests = [loop.add(name, 100) for name in "ab"]
    drafted = 0
    while loop.scheduler.has_unfinished_requests():
        drafted += len(loop.step().scheduled_spec_decode_tokens)
    assert [request.num_output_tokens for request in requests] == [100, 100]
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert drafted > 50
