# SPDX-License-Identifier: Apache-2.0
"""The managers, step by step on real trees without an engine: sizes, counts, what is learned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_bastion.engine.lagged import LaggedVerificationManager
from vllm_bastion.engine.verification import BastionVerificationManager
from vllm_bastion.policy.controller import Batch, Controller, Decision
from vllm_bastion.policy.cost.latency import StepEstimate
from vllm_bastion.policy.gains import Gains
from vllm_bastion.telemetry.recorder import Recorder

from benchmarks.replay.controller import choose_budget as choose_budget_on_host
from tests.trees import grow, make_trees
from vllm_bastion.carriers import StepReport
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.step import Step
from vllm_bastion.telemetry.record import StepRecord

DEPTH, NODES, VOCAB, SLOTS = 4, 10, 32, 5
COST = (4.0 + 0.15 * np.arange(129)).astype(np.float32)


class Told(Gains):
    """Gains that note what they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []

    def add_trees(self, requests: Any, promised: Any, nodes: Any) -> None:
        if requests:
            self.told.append(("promised", list(requests), list(nodes), float(np.sum(promised))))

    def add_outcomes(self, requests: Any, promised: Any, accepted: Any) -> None:
        if requests:
            self.told.append(("realised", list(requests), float(sum(promised)), sum(accepted)))

    def add_last_outcomes(self, promised: Any, accepted: Any) -> None:
        if promised:
            self.told.append(("last", float(sum(promised)), sum(accepted)))


class Drafts(Controller):
    """A controller whose trees always pay."""

    gains: Told

    def _weigh(self, batch: Batch, costs: StepEstimate) -> Decision:
        return Decision(True, "pays", costs.plain_ms)


class Steps:
    """Drives a manager as the runner does; `slots` is the batch of all steps."""

    def __init__(self, kind: type[BastionVerificationManager], slots: list[int], **given: Any):
        budget = given.get("budget")
        self.trees = make_trees(SLOTS, NODES, DEPTH, rows=128, budget=budget)
        latency: Any = SimpleNamespace(estimate=lambda *_: StepEstimate(COST, 4.0, 4.0))
        controller = Drafts(15, SLOTS, latency, self.trees)
        self.gains = controller.gains = Told()
        self.runtime = Runtime(self.trees, controller=None if budget else controller)
        self.names = {f"r{slot}": slot for slot in slots}
        states = SimpleNamespace(
            req_id_to_index=self.names, num_speculative_steps=NODES, max_model_len=100,
            max_seq_len=np.full(SLOTS, 90), prefill_len=SimpleNamespace(np=np.full(SLOTS, 20)),
        )  # fmt: skip
        self.starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.manager = kind(self.runtime, states, self.starts, 1, 1000)
        self.slots = np.array(slots)
        for slot in slots:
            self.manager.add_request(slot)
        self.step = 0
        # Of every step: N* and the promise of the trees grown at its end, tokens emitted in it.
        self.asked: list[tuple[list[int], float, list[int]]] = []
        self.records: list[StepRecord] = []

    def join(self, slots: list[int]) -> None:
        """New requests, from the next step on."""
        self.names |= {f"r{slot}": slot for slot in slots}
        self.slots = np.array([*self.slots, *slots])
        for slot in slots:
            self.manager.add_request(slot)

    def batch(self, rows: int = 0) -> Any:
        return SimpleNamespace(
            idx_mapping_np=self.slots, num_tokens=rows, has_prefill=False, num_reqs=len(self.slots)
        )

    def run(self, limits: dict[str, int] | None = None) -> dict[str, int]:
        """One step; the nodes that its output reports. The scheduler cuts drafts to `limits`."""
        count = len(self.slots)
        drafts = {name: [-1] * (limits or {}).get(name, NODES) for name in self.names}
        scheduled = {name: 1 + len(tokens) for name, tokens in drafts.items()}
        rows = self.manager.get_num_tokens(scheduled, drafts)
        self.manager.compact_batch(None, None, np.zeros(count + 1, dtype=np.int32))
        # Requests with fewer rows may come in another order.
        order = list(self.manager._req_ids)
        cu, _, total, *_ = self.manager.reallocate_drafts(
            order, torch.tensor([self.names[name] for name in order])
        )
        assert rows == count + total == int(cu[-1])
        if isinstance(self.manager, LaggedVerificationManager):
            limits = self.manager._layout_np[0, self.manager._slots]
            if 0 < total < limits.sum() and np.count_nonzero(limits) > 1:
                assert self.starts[: count + 1].tolist() == cu.tolist()
        fixed = self.trees.budget is not None
        assert fixed or self.manager.plan(self.batch(rows), 1.0, 0).drafts
        emitted = [1 + (self.step * 3 + i) % 4 for i in range(count)]
        self.trees.bind_rows(torch.tensor(self.slots), torch.tensor(emitted, dtype=torch.int32))
        generator = torch.Generator().manual_seed(self.step)
        grow(self.trees, 4 * torch.randn(count * DEPTH, VOCAB, generator=generator), count)
        self.manager.record_confidences(None, self.batch(rows))
        tokens = dict(zip(self.names, emitted, strict=True))
        result = SimpleNamespace(
            sampled_token_ids=[[0] * tokens[name] for name in order],
            req_id_to_index={name: row for row, name in enumerate(order)},
        )
        output: Any = SimpleNamespace(get_output=lambda: result)
        report = StepReport.of(self.manager.counted(output).get_output())
        reported = report.num_verified
        assert list(reported.values()) == (cu.diff() - 1).tolist()
        if report.step is not None:
            self.records.append(report.step)
        rho = self.trees.log_rho[self.slots].double().exp().numpy()
        best = choose_budget_on_host(rho, [NODES] * count, COST, count)
        self.asked.append((best.counts.tolist(), best.expected_tokens - count, emitted))
        self.step += 1
        return reported


@pytest.mark.parametrize("kind", [BastionVerificationManager, LaggedVerificationManager])
def test_the_controller_hears_of_each_step_once_and_at_a_fixed_distance(kind: Any) -> None:
    steps, heard = Steps(kind, [3, 0, 4]), 0
    for now in range(9):
        steps.run()
        told, heard = steps.gains.told[heard:], len(steps.gains.told)
        # Trees of this step are those that the last one grew; lagged: one more step back, although
        # on a CPU everything has arrived.
        trees = now - kind.lag
        if trees < 1:
            assert not told
            continue
        nodes, promised, _ = steps.asked[trees - 1]
        assert told[-1][:3] == ("promised", [3, 0, 4], nodes)
        assert told[-1][3] == pytest.approx(promised, rel=1e-5)
        if trees > 1:
            before, emitted = steps.asked[trees - 2][1], steps.asked[trees - 1][2]
            assert told[0][:2] == ("realised", [3, 0, 4]) and told[0][3] == sum(emitted) - 3
            assert told[0][2] == pytest.approx(before, rel=1e-5)
    assert len({tuple(nodes) for nodes, *_ in steps.asked}) > 4


def test_lagged_sizes_come_from_the_step_before_and_shares_from_this_one() -> None:
    steps = Steps(LaggedVerificationManager, [2, 4, 1])
    steps.run()
    assert sum(steps.run().values()) == NODES, "nothing is known of any tree yet"
    uneven = 0
    for now in range(2, 9):
        asked = sum(steps.asked[now - 2][0])
        rho = steps.trees.log_rho[steps.slots].double().exp().numpy()
        shares = steps.run()
        assert sum(shares.values()) == asked
        best = np.sort(rho.ravel())[::-1][:asked]
        got = [value for row, n in zip(rho, shares.values(), strict=True) for value in row[:n]]
        np.testing.assert_allclose(sorted(got, reverse=True), best)
        uneven += max(shares.values()) - min(shares.values()) > 1
    assert uneven


def test_a_batch_that_grew_keeps_its_nodes_until_its_own_scores_arrive() -> None:
    steps = Steps(LaggedVerificationManager, [2])
    for _ in range(4):
        steps.run()
    steps.join([4, 1])
    verified = [sum(steps.run().values()) for _ in range(4)]
    assert verified == [sum(asked) for asked, *_ in steps.asked[2:6]]
    assert [len(asked) for asked, *_ in steps.asked[2:6]] == [1, 1, 3, 3]


def test_what_a_slots_last_request_promised_is_not_its_next_ones() -> None:
    steps = Steps(LaggedVerificationManager, [2, 0])
    for _ in range(4):
        steps.run()
    steps.manager.add_request(0)
    before = len(steps.gains.told)
    steps.run()
    told = {kind: rest for kind, *rest in steps.gains.told[before:]}
    assert told["promised"][0] == told["realised"][0] == [2]
    assert told["realised"][2] == steps.asked[2][2][0] - 1
    # Kappa of all requests learns from its last tree.
    assert told["last"][1] == steps.asked[2][2][1] - 1


@pytest.mark.parametrize("kind", [BastionVerificationManager, LaggedVerificationManager])
def test_steps_without_trees_teach_nothing_and_the_last_ones_are_still_heard(kind: Any) -> None:
    steps = Steps(kind, [1, 3])
    for _ in range(3):
        steps.run()
    asked = steps.asked[:]
    empty = steps.batch()
    before = len(steps.gains.told)
    steps.runtime.step = Step(drafts=False)
    steps.run()  # verifies trees and grows none
    for _ in range(3):  # the scheduler may not even ask
        steps.manager.plan(empty, 1.0, 0)
        steps.trees.bind_rows(torch.tensor(steps.slots), torch.ones(2, dtype=torch.int32))
        steps.manager.record_confidences(None, empty)
    promised = [told for told in steps.gains.told[before:] if told[0] == "promised"]
    realised = [told for told in steps.gains.told[before:] if told[0] == "realised"]
    assert [told[2] for told in promised] == [nodes for nodes, *_ in asked[2 - kind.lag : 3]]
    emitted = [sum(tokens) - 2 for *_, tokens in steps.asked[2 - kind.lag : 4]]
    assert [told[3] for told in realised] == emitted


def test_a_budget_that_is_a_number_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(BastionVerificationManager, [4, 2], budget=6)
    copy = "the host has no use for a copy, nor for waiting for it"
    monkeypatch.setattr(steps.trees, "publish", lambda *_: pytest.fail(copy))
    steps.run()
    assert steps.run() == {"r4": 6, "r2": 6}
    steps.trees.use_chains()
    assert steps.run() == {"r4": DEPTH, "r2": DEPTH}


def test_a_fixed_budget_does_not_leave_the_graphs() -> None:
    steps = Steps(BastionVerificationManager, [4, 2, 0], budget=6)
    steps.runtime.graph_sizes = np.array([4, 8, 16])
    steps.run()
    assert sum(steps.run().values()) == 13
    steps.runtime.graph_sizes = np.array([1, 2])  # nor do the roots fit
    assert sum(steps.run().values()) == 18


@pytest.mark.parametrize("kind", [BastionVerificationManager, LaggedVerificationManager])
def test_a_requests_own_budget_leaves_the_other_trees_what_they_ask_for(kind: Any) -> None:
    """The same steps, drafted from the same logits, with and without the limited requests."""
    limited, limits = Steps(kind, [0, 1, 2, 3]), {0: 0, 2: 2}
    for slot, nodes in limits.items():
        limited.trees.set_node_limit(slot, nodes)
    asked: list[list[int]] = []
    for _ in range(6):
        limited.run({f"r{slot}": nodes for slot, nodes in limits.items()})
        trees, slots = limited.trees, limited.slots
        most = [limits.get(int(slot), NODES) for slot in slots]
        rho = trees.log_rho[slots].double().exp().numpy()
        best = choose_budget_on_host(rho, most, COST, len(slots))
        asked.append(trees.num_verify[slots].tolist())
        assert asked[-1] == best.counts.tolist()
    shares = limited.run({f"r{slot}": nodes for slot, nodes in limits.items()})
    assert shares["r0"] == 0 and shares["r2"] <= 2
    if kind is LaggedVerificationManager:
        # An average over all four would leave the others a quarter less.
        assert sum(shares.values()) == sum(asked[-2])
    assert limited.manager.plan(limited.batch(), 1.0, 0).drafts
    limited.slots = np.array([0])
    assert limited.manager.plan(limited.batch(), 1.0, 0).reason == "requests want none"


@pytest.mark.parametrize("kind", [BastionVerificationManager, LaggedVerificationManager])
def test_recorded_steps_are_those_that_were_made(kind: Any) -> None:
    """Nodes as the output has them, promises paired with what the same trees yielded."""
    steps = Steps(kind, [3, 0, 4])
    steps.runtime.recorder = Recorder("tree", "no gate")
    reported = [[nodes for nodes in steps.run().values() if nodes] for _ in range(9)]
    records = steps.records
    assert [record.nodes for record in records] == reported
    # Prompts leave no trees for the first step here, which nobody decided about.
    assert [record.kind for record in records] == ["plain"] + ["tree"] * 8
    realised = [told[2:] for told in steps.gains.told if told[0] == "realised"]
    pairs = [(record.promised, record.yielded) for record in records if record.promised]
    assert pairs == [pytest.approx(told) for told in realised]
    totals = Totals()
    totals.add(records)
    assert totals.nodes == sum(map(sum, reported)) and totals.steps_of("tree") == 8
    # A plain step takes four milliseconds.
    costs = [COST[3 + sum(nodes)] for nodes in reported[1:]]
    assert totals.step_ms == pytest.approx(sum(costs), rel=1e-5)
    emitted = [sum(tokens) for *_, tokens in steps.asked[1:]]
    assert totals.plain_ms == pytest.approx(sum(4.0 * tokens / 3 for tokens in emitted))


@pytest.mark.parametrize("kind", [BastionVerificationManager, LaggedVerificationManager])
def test_remaining_tokens_are_those_that_the_host_does_not_know_to_be_emitted(kind: Any) -> None:
    steps, emitted = Steps(kind, [3, 0]), np.zeros((0, 2), dtype=int)
    for now in range(8):
        _, remaining = steps.manager.continuing(steps.batch())
        # 70 at the start. Steps that the host has not read count as one token each, as this one.
        read = emitted[: max(now - kind.lag, 0)].sum(axis=0)
        unread = now - max(now - kind.lag, 0) + 1
        # The first step has no trees, so its emitted tokens are not read.
        first = emitted[0] - 1 if now > kind.lag else 0
        assert (70 - remaining - read + first).tolist() == [unread] * 2
        sampled = torch.tensor([5, 70], dtype=torch.int32)
        slots, rest = steps.manager.continuing(steps.batch(), sampled)
        assert slots.tolist() == [3] and rest.tolist() == [remaining[0] - 4]
        # The last token of a reply is a plain step's.
        sampled[0] += int(rest[0]) - 1
        assert not len(steps.manager.continuing(steps.batch(), sampled)[0])
        steps.run()
        emitted = np.vstack([emitted, steps.asked[-1][2]])


def test_a_prompt_that_continues_emits_nothing() -> None:
    steps = Steps(BastionVerificationManager, [3, 0, 1])
    batch = steps.batch()
    batch.has_prefill = True
    batch.num_computed_tokens_np = np.array([0, 16, 30])
    batch.num_scheduled_tokens = np.array([16, 4, 1])
    batch.prefill_len_np = np.array([40, 20, 20])
    slots, remaining = steps.manager.continuing(batch)
    assert (slots.tolist(), remaining.tolist()) == ([0, 1], [69, 69])
