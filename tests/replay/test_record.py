# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts around an engine: counting, recording, reading a recorded tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.decoder import Completion, count
from benchmarks.probes import SeenTree
from benchmarks.replay.costs import paper_a100
from tests.e2e.engines import given_costs
from vllm_bastion.policy.cost.store import read_profile

PROMPTS = [
    {"id": f"{domain}-{i}", "domain": domain, "prompt": f"{domain} {i}"}
    for domain in ("code", "arithmetic", "chat")
    for i in range(2)
]


def test_counts() -> None:
    tree = [Completion(row["id"], [1, 2, 3, 4, 5], "", [3, 1], [8, 6]) for row in PROMPTS]
    total = count(tree[:2])
    assert (total.tokens, total.forwards, total.tau, total.mean_verified) == (8, 4, 2.0, 7.0)
    assert count([]).tau == 0.0


@pytest.mark.parametrize(
    ("path", "chain"),
    [([0], 0), ([0, 1, 2], 2), ([0, 1, 4], 1), ([0, 3], 0)],
    ids=["nothing accepted", "a chain", "leaves at depth 2", "leaves at once"],
)
def test_the_length_that_a_chain_would_have_had_accepted(path: list[int], chain: int) -> None:
    # 1 and 3 below the root, 2 and 4 below 1: best children are 1 and 2.
    seen = SeenTree(
        request=0,
        position=1,
        root=9,
        tokens=[10, 11, 12, 13],
        parents=[0, 1, 0, 1],
        log_rho=[-0.1, -0.2, -2.0, -3.0],
        num_verified=4,
        path=path,
        emitted=[0],
    )
    assert seen.chain_length() == chain
    assert seen.accepted == len(path) - 1


def test_a_gpus_costs_are_written_as_a_profile(tmp_path: Path) -> None:
    source = paper_a100(128)
    keys = given_costs(source.table, tmp_path / "a100.json", source.calibrated)
    profile = read_profile(Path(keys["calibration"]))
    costs = profile.table.cost_ms(1, 100.0)
    assert len(costs) == 129
    # The paper's 22.0 ms at 32 nodes and 55.9 ms at 1024, with the drafter's 3.06 ms on top.
    assert costs[32] == pytest.approx(25.06, abs=0.1)
    assert costs[128] == pytest.approx(25.06 + 96 * 33.9 / 992, abs=0.1)
