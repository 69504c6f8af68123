# SPDX-License-Identifier: Apache-2.0
"""How a decision becomes the record of a step: trials, copies without nodes, and new requests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm_bastion.policy.controller import Controller, Decision
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.table import StepCostTable
from vllm_bastion.policy.reach import DraftReach

from tests.trees import grow, make_trees
from vllm_bastion.engine.planning import _with_copies, make_step
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.step import Step

NODES, SLOTS, DEPTH = 10, 4, 6


def make_runtime() -> Runtime:
    runtime = Runtime(make_trees(SLOTS, NODES, depth=DEPTH))
    latency = CurveLatency(StepCostTable.flat(max_rows=64))
    runtime.controller = Controller(
        DEPTH, SLOTS, latency, copy_depth=runtime.trees.depth, sees_copies=True
    )
    return runtime


def step_of(runtime: Runtime, rows: list[int], nodes: list[int]) -> Step:
    """The record of a step with these rows and nodes for the first slots."""
    runtime.scheduled = SchedulerOutput.make_empty()
    runtime.scheduled.num_spec_tokens_to_schedule = NODES
    batch = SimpleNamespace(
        num_reqs=len(rows), idx_mapping_np=np.arange(len(rows)), max_query_len=None,
        num_computed_tokens_np=np.full(len(rows), 20), num_scheduled_tokens=np.array(rows),
        num_draft_tokens=sum(nodes), num_draft_tokens_per_req=np.array(nodes), has_prefill=False,
    )  # fmt: skip
    runtime.step = make_step(runtime, batch, always_binds=False, for_trees=False)  # type: ignore[arg-type]
    return runtime.step


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_trial_of_trees_times_a_step_that_verifies_and_drafts(looks_up: bool) -> None:
    """With async scheduling: what is announced in a step is drafted in the next one."""
    runtime = make_runtime()
    runtime.announces_early, plain = True, Decision(False, "does not pay", looks_up=looks_up)
    trial = Decision(True, "trial of trees", is_trial=True)
    decisions = iter([plain, plain, trial, trial, plain, plain])
    runtime.manager = SimpleNamespace(plan=lambda *_: next(decisions))
    runtime.step = Step(announces=False)
    drafted = [step_of(runtime, [1], [0]).drafts for _ in range(6)]
    assert drafted == [False, False, False, True, True, False]


def test_a_request_whose_prompt_ends_beside_shallow_trees_drafts_whole_blocks() -> None:
    runtime = make_runtime()
    runtime.controller, runtime.reach = None, DraftReach(SLOTS, DEPTH)
    grow(runtime.trees, torch.zeros(DEPTH, 32), 1)
    assert step_of(runtime, [2], [1]).spared > 0
    assert step_of(runtime, [2, 20], [1, 0]).spared == 0
    # Once it decodes without nodes, it does not hold up the others.
    assert step_of(runtime, [2, 1], [1, 0]).spared > 0


@pytest.mark.parametrize("limit", [0, NODES])
def test_a_copy_that_may_have_no_nodes_promises_nothing(limit: int) -> None:
    runtime = make_runtime()
    history = torch.arange(100, dtype=torch.int32).repeat(SLOTS, 1)
    history[0] %= 5  # the only text that repeats
    runtime.trees.look_up(history, torch.full((SLOTS,), 60, dtype=torch.int32))
    runtime.trees.bind_rows(torch.arange(2), torch.ones(2, dtype=torch.int32))
    runtime.trees.set_node_limit(0, limit)
    slots, remaining = np.arange(2), np.array([30, 30])
    step = Step(drafts=False, looks_up=True)
    changes = _with_copies(runtime, step, 2, slots, remaining)
    assert changes.get("looks_up", step.looks_up) == (limit > 0)
