# SPDX-License-Identifier: Apache-2.0
"""A second start on a CPU loads what the first one compiled, and no bad profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import GAMMA, Batch, Engine, Runner
from tests.e2e.marks import on_cpu
from vllm_bastion.policy.cost.doubts import doubts
from vllm_bastion.policy.cost.store import read_profile

pytestmark = on_cpu("engines on a GPU are not compiled in these tests")


def loads(session: Any) -> list[tuple[int, int]]:
    """Probe: the models whose compiled function was stored, and loaded."""
    from vllm.compilation.counter import compilation_counter as count

    return [(count.num_aot_artifacts_saved, count.num_aot_artifacts_loaded)]


def test_a_second_start_compiles_nothing(runner: Runner) -> None:
    engine = Engine().with_bastion(16)
    batches = [Batch("start"), Batch("another start")]
    for name, text in cases.some(2, first=3):
        for batch in batches:
            # Different names, because identical engines run only once a session.
            batch.add(f"{batch.case}: {name}", text, max_tokens=24, ignore_eos=True)
    first, second = (
        runner.run(engine, [batch], probe="tests.e2e.test_starts:loads")["batches"][0]
        for batch in batches
    )
    # Target and drafter. Another test may have compiled them before this one.
    assert first["probed"][0] in ([2, 0], [0, 2]) and second["probed"][0] == [0, 2]
    tokens = [
        [request["token_ids"] for request in result["requests"].values()]
        for result in (first, second)
    ]
    assert tokens[0] == tokens[1] and all(tokens[0])


@pytest.mark.slow
def test_a_start_measures_a_contradictory_profile_again(runner: Runner) -> None:
    """A stored time that larger steps contradict is not loaded; what replaces it is sound."""
    nodes, length = 8, 251  # a length of its own, so that no other engine has this profile
    longest = length - GAMMA - 3 - nodes  # cached tokens of the longest steps that are timed
    engine = Engine(max_model_len=length, eager=True).with_bastion(nodes, calibration="auto")
    batches = [Batch("first start"), Batch("start with a bad profile")]
    for batch in batches:
        batch.add(batch.case, cases.some(1)[0][1], max_tokens=8)
    runner.run(engine, batches[:1])
    (path,) = [
        path
        for path in Path(runner.caches["VLLM_BASTION_CACHE"]).glob("*.json")
        if read_profile(path).key.largest[2] == longest
    ]
    stored = json.loads(path.read_text())
    samples = stored["table"]["samples"]
    few = min(rows for rows, *_ in samples)
    for sample in samples:
        if sample[0] == few:
            sample[2] = 299.0
    path.write_text(json.dumps(stored))
    assert doubts(read_profile(path).table.samples)
    runner.run(engine, batches[1:])
    again = read_profile(path)
    assert again.created != stored["created"]
    assert max(ms for _, _, ms, _ in again.table.samples) < 299.0
