# SPDX-License-Identifier: Apache-2.0
"""The budget follows the costs it is given, and the tokens do not depend on it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import GAMMA, Batch, Engine, Runner
from vllm_bastion.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.cost.table import StepCostTable

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NODES = 24
TABLES = {
    # Rows cost nothing: the largest tree is the best one.
    "flat": StepCostTable.flat(10.0, max_rows=128),
    # A row costs a tenth of a step: only likely nodes pay.
    "dear": StepCostTable.linear(10.0, 1.0, max_rows=128),
    # Every row is a step of its own, and the drafter costs ten: nothing pays.
    "hopeless": StepCostTable.linear(0.001, 1.0, max_rows=128, drafter_ms=10.0),
}


def test_the_budget_follows_the_cost_table(
    runner: Runner, compare: Comparison, tmp_path: Path
) -> None:
    batch = Batch("cost tables from flat to hopeless, T=0")
    for name, text in cases.some(1):
        batch.add(name, text, temperature=0, max_tokens=64, ignore_eos=True)
    # Batch 1: the paper's rule, and no step is shared.
    plain = Engine(max_num_seqs=1, eager=True)
    runs = {}
    for name, table in TABLES.items():
        path = tmp_path / f"{name}.json"
        write_profile(Profile(ProfileKey(name, "", "", "", "", 1, ""), table), path)
        engine = plain.with_bastion(NODES, calibration=str(path), latency_model="table")
        runs[name] = runner.submit(engine, [batch])
    expected = runner.run(plain, [batch])
    for name, run in runs.items():
        compare.same(f"{name} costs", [batch], expected, run.result())
    verified = {name: run.result()["batches"][0]["verified"] for name, run in runs.items()}
    assert set(verified["flat"]) == {NODES}
    assert 0 < mean(verified["dear"]) < GAMMA
    # Some trees are tried now and then; everything else is plain decoding.
    steps = runs["hopeless"].result()["batches"][0]["forwards"]
    assert len(verified["hopeless"]) < 0.5 * steps
    assert steps > 2 * runs["flat"].result()["batches"][0]["forwards"]
