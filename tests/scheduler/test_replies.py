# SPDX-License-Identifier: Apache-2.0
"""A step's tokens end a reply where vLLM's schedulers end it, and leave it in the same state."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tests.scheduler_core import new_core
from vllm_bastion.hooks.scheduler import BastionAsyncScheduler, BastionScheduler

BOTH = ((BastionScheduler, Scheduler), (BastionAsyncScheduler, AsyncScheduler))


@pytest.mark.parametrize("kinds", BOTH)
def test_replies_are_those_of_vllm(kinds: tuple[Any, Any]) -> None:
    init_none_hash(hash)
    hasher, repeated = get_request_block_hasher(4, hash), RepetitionDetectionParams(2, 1, 2)
    ends = set()
    for seed in range(300):
        draw, core, cached = random.Random(seed), new_core(kinds[0]), list[int]()
        core.max_model_len = draw.choice((14, 4096))
        core.kv_cache_manager.cache_blocks = lambda _, count, to=cached: to.append(count)
        params = SamplingParams(
            max_tokens=draw.choice((6, 12, 99)), min_tokens=draw.choice((0, 5)),
            stop_token_ids=draw.choice(([], [8])), ignore_eos=draw.random() < 0.5,
            repetition_detection=draw.choice((None, None, repeated)),
        )  # fmt: skip
        params.update_from_generation_config({"eos_token_id": draw.choice((9, [9, 7]))}, 9)
        both = [Request("r", [1, 2, 3], params, None, block_hasher=hasher) for _ in kinds]
        stopped = False
        while not stopped and both[0].num_output_tokens < 20:
            tokens, states = [draw.randrange(4, 10) for _ in range(draw.randrange(1, 7))], []
            for kind, one in zip(kinds, both, strict=True):
                one.status, one.num_computed_tokens = RequestStatus.RUNNING, 40
                one.num_output_placeholders = 8 if core.runs_ahead else 0
                found, stopped = kind._update_request_with_output(core, one, [*tokens])
                told = cached[-1:]  # in vLLM 0.32 with asynchronous scheduling
                emitted, hashes = list(one.output_token_ids), list(one.block_hashes)
                known = (list(one.all_token_ids), one.num_output_placeholders, hashes, told)
                states.append((found, stopped, one.status, one.stop_reason, emitted, known))
            assert states[0] == states[1], seed
        ends.add((both[0].status, both[0].stop_reason))
    assert len(ends) >= 6, "by length, the model's end, stop tokens and repetition, or not at all"
