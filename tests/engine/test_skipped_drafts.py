# SPDX-License-Identifier: Apache-2.0
"""Steps for which vLLM wants no draft, because no request in them can use one (from 0.33 on)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm_bastion.engine.verification import BastionVerificationManager
from vllm_bastion.policy.controller import Batch, Controller, Decision
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.table import StepCostTable

from tests.trees import grow, make_trees
from vllm_bastion.drafters.dflash import BastionSpeculator
from vllm_bastion.engine.planning import make_step
from vllm_bastion.engine.runtime import Runtime

NODES, SLOTS = 10, 4


class Asked(Controller):
    """Counts how often it is asked, and always drafts."""

    asked = 0

    def plan(self, batch: Batch) -> Decision:
        self.asked += 1
        return Decision(True, "pays", 1.0)


class Engine:
    """The speculator, the manager and what they tell the others, without vLLM's drafter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.trees = make_trees(SLOTS, NODES, depth=3)
        self.timed: list[bool] = []
        self.runtime = Runtime(self.trees)
        self.runtime.timer = SimpleNamespace(
            step_done=lambda drafted, *_: self.timed.append(drafted), num_pending=0
        )
        self.runtime.controller = Asked(3, SLOTS, CurveLatency(StepCostTable.flat(max_rows=64)))
        states = SimpleNamespace(
            req_id_to_index={}, num_speculative_steps=NODES, max_model_len=100,
            max_seq_len=np.full(SLOTS, 30), prefill_len=SimpleNamespace(np=np.full(SLOTS, 20)),
        )  # fmt: skip
        starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.manager = BastionVerificationManager(self.runtime, states, starts, 1, 1000)
        self.runtime.manager = self.manager
        self.speculator = object.__new__(BastionSpeculator)
        self.speculator.runtime, self.speculator.trees = self.runtime, self.trees
        self.speculator._context_hidden = [torch.zeros(64, 8)]
        self.speculator._context_layers = []
        patch.setattr(BastionSpeculator, "_store", lambda *_: None)
        patch.setattr(DFlashSpeculator, "propose", self._propose)

    @property
    def asked(self) -> int:
        """Times that the controller was asked."""
        asked: int = self.runtime.controller.asked
        return asked

    def _propose(self, batch: Any, *args: Any, num_speculative_tokens: int, **_: Any) -> None:
        """As vLLM's: nothing is drafted where nothing is wanted."""
        if num_speculative_tokens:
            logits = torch.randn(batch.num_reqs * 3, 32, generator=torch.Generator().manual_seed(1))
            grow(self.trees, logits, batch.num_reqs)

    @torch.inference_mode()
    def step(self, slots: list[int], wanted: int) -> torch.Tensor:
        """What vLLM's runner does after sampling."""
        count = len(slots)
        batch = SimpleNamespace(
            num_reqs=count, idx_mapping=torch.tensor(slots), idx_mapping_np=np.array(slots),
            num_computed_tokens_np=np.full(count, 20),
            num_scheduled_tokens=np.ones(count, dtype=np.int32), prefill_len_np=np.full(count, 20),
            num_tokens=count, num_draft_tokens=0, num_draft_tokens_per_req=None, has_prefill=False,
            positions=torch.full((count,), 20),
        )  # fmt: skip
        hidden, counts = torch.zeros(count, 8), torch.ones(count, dtype=torch.int32)
        step = SchedulerOutput.make_empty()
        step.num_spec_tokens_to_schedule = wanted
        self.runtime.scheduled = step
        self.runtime.step = make_step(self.runtime, batch, always_binds=False, for_trees=False)
        drafts = self.speculator.propose(
            batch, {}, {}, hidden, [hidden], counts, counts, num_speculative_tokens=wanted
        )
        assert drafts.shape == (count, NODES)
        if wanted < NODES:
            drafts[:, wanted:] = -1
        self.manager.record_confidences(counts, batch)
        return drafts


def test_a_step_whose_drafts_nobody_can_use_leaves_no_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch)
    first = engine.step([0, 1], NODES).clone()
    assert (engine.asked, engine.timed, engine.manager._treeless) == (1, [True], set())
    engine.step([1, 2], 0)
    # The gate decides of drafts that may be used, the timer learns that none was made, and nobody
    # verifies a tree that is not there.
    assert (engine.asked, engine.timed, engine.manager._treeless) == (1, [True, False], {1, 2})
    # What vLLM writes over the drafts is no token, and a tree need not fill all its columns.
    assert torch.equal(engine.trees.tokens[:2], first)
    engine.step([1, 2], NODES)
    assert (engine.asked, engine.timed, engine.manager._treeless) == (2, [True, False, True], set())


def test_a_budget_of_zero_runs_no_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.trees.budget, engine.runtime.controller = 0, None
    engine.step([0, 1], NODES)
    engine.step([0, 1], NODES)
    assert engine.timed == [False, False] and engine.manager._treeless == {0, 1}
    assert not engine.runtime.step.announces, "the scheduler plans no placeholders"
