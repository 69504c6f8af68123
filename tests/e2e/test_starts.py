# SPDX-License-Identifier: Apache-2.0
"""A second start on a CPU loads what the first one compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import Batch, Engine, Runner
from tests.e2e.marks import on_cpu

pytestmark = on_cpu("engines on a GPU are not compiled in these tests", pytest.mark.slow)


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
