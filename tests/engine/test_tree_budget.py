# SPDX-License-Identifier: Apache-2.0
"""The budget step by step on real trees, without an engine, against search over whole batches."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from benchmarks.replay.policies import best_total, shares
from tests.trees import grow, make_trees
from vllm_bastion.attached import StepPlan
from vllm_bastion.engine.budget import TreeBudgetManager, in_order
from vllm_bastion.engine.planning import decide_again, make_step
from vllm_bastion.engine.profile import _curve
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.step import Step

DEPTH, NODES, VOCAB, SLOTS, ROWS = 4, 10, 32, 8, 200
VERIFY_MS = 4.0 + 0.15 * np.arange(ROWS + 1)
DRAFT_MS = 1.0 + 0.1 * np.arange(SLOTS + 1)


class Output(AsyncModelRunnerOutput):
    """Of a step, without tokens."""

    def get_output(self) -> Any:
        return SimpleNamespace()

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 declares it."""
        raise NotImplementedError


class Steps:
    """Drives a manager as the runner does.

    Args:
        slots: of the requests of all steps.
        most: logits rows that vLLM has memory for in a step.
        rows: of the largest graph.
    """

    def __init__(
        self,
        slots: list[int],
        *,
        lagged: bool,
        budget: int | None = None,
        most: int = 1000,
        rows: int = 1000,
    ) -> None:
        self.trees = make_trees(SLOTS, NODES, DEPTH, rows=ROWS, budget=budget)
        self.runtime = Runtime(self.trees)
        self.names = {f"r{slot}": slot for slot in slots}
        states: Any = SimpleNamespace(req_id_to_index=self.names, num_speculative_steps=NODES)
        self.starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.manager = TreeBudgetManager(
            self.runtime, states, self.starts, 1, most, rows, lagged=lagged
        )
        self.manager.cost_tables = DRAFT_MS, VERIFY_MS
        self.plan = StepPlan()
        self.slots = np.array(slots)
        for slot in slots:
            self.manager.add_request(slot)

    def draft(
        self, seed: int, arm: Arm = Arm.TREE, hit: Any = slice(0), value: float = 0.0
    ) -> None:
        """Grow the trees of the next step, or none; of logits `[R * D, V]` that have a value."""
        reqs = torch.tensor(self.slots)
        self.runtime.step = Step(arm=arm)
        if arm != Arm.PLAIN:
            generator = torch.Generator().manual_seed(seed)
            logits = 4 * torch.randn(len(reqs) * DEPTH, VOCAB, generator=generator)
            logits[hit] = value
            self.trees.bind_rows(reqs)
            grow(self.trees, logits, len(reqs))
        batch: Any = SimpleNamespace(idx_mapping_np=self.slots, idx_mapping=reqs)
        self.manager.record_confidences(torch.empty(0), batch)

    def verify(self, limits: list[int], prompts: list[int] | None = None) -> dict[str, int]:
        """Nodes of each request as the step's output reports them."""
        self.runtime.plan = self.plan
        prompts = prompts or [0] * len(limits)
        drafts, slots = np.array(limits, dtype=np.int32), self.slots
        batch: Any = SimpleNamespace(
            req_ids=list(self.names), idx_mapping_np=slots, num_draft_tokens_np=drafts,
            num_scheduled_tokens=1 + drafts + np.array(prompts, dtype=np.int32),
        )  # fmt: skip
        rows = self.manager.decide(batch)
        self.manager.compact_batch(
            np.zeros(0), np.zeros(0), np.zeros(len(slots) + 1, dtype=np.int32)
        )
        ends, _, total, *_ = self.manager.reallocate_drafts(batch.req_ids, torch.tensor(slots))
        assert rows == len(slots) + sum(prompts) + total
        assert int(ends[-1]) == len(slots) + total
        found = self.manager.counted(Output()).get_output()
        self.expected = found.bastion.expected
        return dict(found.bastion.num_verified)

    def rho(self) -> np.ndarray:
        return np.exp(self.trees.log_rho.numpy()[self.slots].astype(np.float64))


def costs(reqs: int) -> np.ndarray:
    return np.asarray(DRAFT_MS[reqs] + VERIFY_MS)


def best_shares(rho: np.ndarray, limits: list[int]) -> list[int]:
    """Each request's nodes by the argmax over all of the batch's scores."""
    scores = [row[:limit] for row, limit in zip(rho, limits, strict=True)]
    return shares(scores, best_total(scores, costs(len(scores))))


def test_exact_budgets_are_the_argmax_over_300_random_batches() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for seed in range(300):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
        limits = rng.integers(0, NODES + 1, len(slots)).tolist()
        steps = Steps(slots, lagged=False)
        steps.draft(seed)
        got = steps.verify(limits)
        best = best_shares(steps.rho(), limits)
        assert [got[name] for name in steps.names] == best
        sizes.append(sum(best))
    assert 0 in sizes and max(sizes) > 20 and len(set(sizes)) > 15, "the costs bind"


def test_it_equals_every_combination_of_counts() -> None:
    for seed in range(20):
        steps = Steps([3, 0], lagged=False)
        steps.draft(seed)
        got, rho = steps.verify([NODES, 6]), steps.rho()
        speeds = {
            counts: (2 + sum(rho[r, :n].sum() for r, n in enumerate(counts)))
            / costs(2)[2 + sum(counts)]
            for counts in itertools.product(range(NODES + 1), range(7))
        }
        assert speeds[got["r3"], got["r0"]] == pytest.approx(max(speeds.values()), rel=1e-6)


def test_lagged_sizes_come_from_the_step_before_and_shares_from_this_one() -> None:
    slots = [1, 4, 6]
    steps = Steps(slots, lagged=True)
    steps.draft(0)
    before, limits = steps.rho(), [NODES] * 3
    for seed in range(1, 12):
        steps.draft(seed)
        got = steps.verify(limits)
        total = sum(best_shares(before, limits))
        assert sum(got.values()) == total
        assert [got[name] for name in steps.names] == shares(steps.rho(), total)
        before = steps.rho()


def test_a_request_without_earlier_scores_counts_with_the_mean() -> None:
    steps = Steps([0, 1], lagged=True)
    for seed in range(30):
        steps.draft(seed)
        steps.verify([NODES] * 2)
    mean = steps.manager._earlier._mean.copy()
    steps.manager.add_request(1)
    steps.draft(30)
    assert np.allclose(steps.manager._earlier.of(np.array([1]), NODES)[0], mean, atol=0.2)
    assert sum(steps.verify([NODES] * 2).values()) > 0


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hit", [slice(DEPTH), (1, 3), slice(None)])
def test_a_drafters_numbers_that_are_not_finite_end_its_trees(
    lagged: bool, value: float, hit: Any
) -> None:
    """They reach neither the choice of N* nor the sum of path scores that is counted."""
    steps = Steps([0, 1], lagged=lagged)
    for seed in range(4):
        steps.draft(seed, hit=hit, value=value)
        before, got = steps.rho(), steps.verify([NODES] * 2)
        assert 0 <= steps.expected <= 2 * NODES
    assert np.isfinite(before).all()
    if not lagged:
        assert got["r0"] <= (before[0] > 0).sum()


@pytest.mark.parametrize("lagged", [False, True])
def test_slots_without_a_tree_verify_nothing(lagged: bool) -> None:
    steps = Steps([0, 1], lagged=lagged)
    assert set(steps.verify([NODES] * 2).values()) == {0}, "new requests"
    steps.draft(0)
    steps.draft(1)
    assert sum(steps.verify([NODES] * 2).values()) > 0
    steps.manager.add_request(0)
    assert steps.verify([NODES] * 2)["r0"] == 0, "another request has taken the slot"
    steps.draft(2, Arm.PLAIN)
    assert set(steps.verify([NODES] * 2).values()) == {0}


@pytest.mark.parametrize("lagged", [False, True])
def test_a_requests_own_budget_leaves_the_other_trees_what_pays(lagged: bool) -> None:
    steps = Steps([0, 1, 2], lagged=lagged)
    steps.trees.node_limits_host[1:3] = 2, 0
    steps.draft(0)
    steps.draft(0)
    got = steps.verify([NODES] * 3)
    best = best_shares(steps.rho(), [NODES, 2, 0])
    assert [got[name] for name in steps.names] == best
    assert got["r0"] > 2 and got["r2"] == 0


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize(
    ("room", "nodes"), [({"most": 3 + 7}, 7), ({"rows": 3 + 50 + 7}, 7), ({"rows": 40}, 0)]
)
def test_no_more_than_there_is_memory_for_and_the_graph_holds(
    lagged: bool, room: dict[str, int], nodes: int
) -> None:
    """The third request computes 50 more rows of its prompt."""
    steps = Steps([0, 1, 2], lagged=lagged, **room)
    steps.manager.cost_tables = DRAFT_MS, np.full(ROWS + 1, 5.0)
    steps.draft(0)
    steps.draft(0)
    assert sum(steps.verify([NODES, NODES, 0], prompts=[0, 0, 50]).values()) == nodes
    assert steps.manager.drafts.any() == (nodes > 0)


def test_a_fixed_budget_cuts_every_tree() -> None:
    steps = Steps([0, 1], lagged=False, budget=3)
    steps.draft(0)
    assert steps.verify([NODES, 2]) == {"r0": 3, "r1": 2}
    short = Steps([0, 1], lagged=False, budget=6, most=2 + 5)
    short.draft(0)
    assert sum(short.verify([NODES] * 2).values()) == 5


def test_a_prompts_time_is_no_reason_for_larger_trees() -> None:
    """With linear costs as many nodes as without the prompt's rows, which cost in any case."""
    sizes = []
    for prompt in (0, 90):
        steps = Steps([0, 1, 2], lagged=False)
        steps.draft(0)
        got = steps.verify([NODES, NODES, 0], prompts=[0, 0, prompt])
        assert got["r2"] == 0
        sizes.append(sum(got.values()))
    assert sizes[0] == sizes[1] > 0


def test_slow_runs_of_a_profile_make_no_larger_size_free() -> None:
    samples = {1: [30.0], 2: [31.0, 58.0, 32.0], 8: [40.0], 16: [36.0], 64: [47.0]}
    assert _curve(samples) == [(1, 30.0), (2, 32.0), (8, 38.0), (16, 38.0), (64, 47.0)]


def test_a_steps_real_time_changes_what_a_node_is_worth() -> None:
    """A step that takes longer in any case, host included, makes a further node cheaper in
    relation; one whose nodes take longer makes them dearer.
    """
    taken = []
    for line in ((1.0, 0.0), (1.0, 20.0), (2.0, 0.0), (2.0, -VERIFY_MS[1] - DRAFT_MS[1])):
        steps = Steps([0], lagged=False)
        steps.plan = StepPlan(line=line)
        taken.append(0)
        for seed in range(12):
            steps.draft(seed)
            taken[-1] += sum(steps.verify([NODES]).values())
    same, slow, scaled, steep = taken
    assert slow > same == scaled > steep > 0


@pytest.mark.parametrize("total", [0, 3, 8, 9, 30])
def test_shares_keep_the_sum_and_the_limits(total: int) -> None:
    limits = np.array([4, 0, 1, 4, 2], dtype=np.int32)
    shares = in_order(total, limits)
    assert shares.sum() == min(total, limits.sum()) and (shares <= limits).all()


# ---- the record of a step ---------------------------------------------------------------


class Found:
    """N-gram drafts as a CPU finds them before the drafter runs."""

    def __init__(self, expected: list[float]) -> None:
        self._expected, self.given_up = np.array(expected), False

    def expected(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        return self._expected

    def give_up(self, slots: torch.Tensor) -> None:
        self.given_up = True


@pytest.mark.parametrize(
    ("arm", "expected", "enough", "remaining", "taken"),
    [
        (Arm.TREE, [0.0, 0.0], 2.0, 50, Arm.TREE),
        (Arm.TREE, [3.0, 0.5], 2.0, 50, Arm.NGRAM),
        (Arm.TREE, [1.0, 0.5], 2.0, 50, Arm.TREE),
        (Arm.TREE, [9.0, 9.0], None, 50, Arm.TREE),
        (Arm.NGRAM, [0.5, 0.0], None, 50, Arm.NGRAM),
        (Arm.NGRAM, [0.0, 0.0], None, 50, Arm.PLAIN),
        (Arm.TREE, [9.0, 9.0], 2.0, 1, Arm.PLAIN),
        (Arm.PLAIN, [9.0, 9.0], 2.0, 50, Arm.PLAIN),
    ],
)
def test_a_cpu_takes_a_simpler_arm_where_it_is_enough(
    arm: Arm, expected: list[float], enough: float | None, remaining: int, taken: Arm
) -> None:
    steps = Steps([0, 1], lagged=False)
    found = steps.trees.ngram = Found(expected)  # type: ignore[assignment]
    plan, length = StepPlan(arm=arm, ngram_tokens=enough), 20
    steps.runtime.plan = plan
    steps.runtime.step = Step(arm=arm)
    states: Any = SimpleNamespace(
        max_seq_len=np.full(SLOTS, length + remaining), max_model_len=1000,
        total_len=SimpleNamespace(gpu=torch.full((SLOTS,), length)),
    )  # fmt: skip
    batch: Any = SimpleNamespace(idx_mapping_np=np.array([0, 1]))
    step = decide_again(steps.runtime, batch, torch.ones(2, dtype=torch.int32), states)
    assert step.arm == taken
    assert found.given_up == (arm == Arm.NGRAM and taken == Arm.PLAIN)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wanted", "arm", "budget", "taken"),
    [
        (NODES, Arm.TREE, None, Arm.TREE),
        (0, Arm.TREE, None, Arm.PLAIN),
        (NODES, Arm.NGRAM, None, Arm.NGRAM),
        (NODES, Arm.TREE, 0, Arm.PLAIN),
    ],
)
def test_a_step_ends_with_the_planned_arm(
    wanted: int, arm: Arm, budget: int | None, taken: Arm
) -> None:
    steps = Steps([0], lagged=False, budget=budget)
    scheduled: Any = SimpleNamespace(num_spec_tokens_to_schedule=wanted)
    steps.runtime.scheduled, steps.runtime.plan = scheduled, StepPlan(arm=arm)
    batch: Any = SimpleNamespace(
        num_draft_tokens_per_req=None, num_reqs=1, num_draft_tokens=0,
        num_scheduled_tokens=np.ones(1, dtype=np.int32),
    )  # fmt: skip
    step = make_step(steps.runtime, batch, for_trees=False)
    assert step.arm == taken and not step.verifies and not step.masked
