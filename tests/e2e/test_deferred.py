# SPDX-License-Identifier: Apache-2.0
"""While nothing is drafted, the drafter's context waits, and nothing is lost by it.

Two engines draft and decode plainly, or with copies alone, in turns. One stores the drafter's keys
and values in every step, the other when drafting resumes. Both must take the same steps, accept the
same drafts and hold the same keys and values, up to the rounding of a product over more rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import Batch, Engine
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e

PLAIN, NGRAM = (f"tests.e2e.plain_steps:{name}in_turns" for name in ("", "ngram_"))
PROBE = "tests.e2e.plain_steps:context"


@pytest.mark.parametrize(
    ("plan", "top_k", "caching"),
    [
        (NGRAM, 16, True),
        *(slow(PLAIN, *how) for how in ((16, True), (16, False), (1, True))),
        slow(NGRAM, 16, False),
    ],
)
def test_context_waits_without_loss(
    compare: Comparison, plan: str, top_k: int, caching: bool
) -> None:
    plain = Engine(max_num_seqs=2, eager=True, extra={"enable_prefix_caching": caching})
    batch = Batch("drafts in turns")
    # The last one starts while others decode, and short ones end while their rows wait.
    for i, (name, text) in enumerate(cases.some(2, first=5)):
        tokens = 120 if i % 2 else 40
        batch.add(f"turns-{name}", text, temperature=0, max_tokens=tokens, ignore_eos=True)
    first = compare.run(plain, [batch])
    engine = plain.with_bastion(15, top_k=top_k)
    runs = {
        "deferred": compare.submit(engine, [batch], setup=[plan], probe=PROBE),
        "at once": compare.submit(
            engine, [batch], setup=[plan, "tests.e2e.plain_steps:at_once"], probe=PROBE
        ),
    }
    for name, run in runs.items():
        label = f"{name}, {plan}, K = {top_k}{'' if caching else ', no prefix caching'}"
        compare.same(label, [batch], first, run.result(), plain)
    deferred, at_once = (run.result()["batches"][0]["probed"] for run in runs.values())
    assert len(deferred) == len(at_once)
    waited = 0
    for mine, other in zip(deferred, at_once, strict=True):
        assert _key(mine) == _key(other)
        waited = max(waited, mine["waiting"])
        if mine["waiting"] == 0:
            for sums, expected in zip(mine["sums"], other["sums"], strict=True):
                assert sums == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert waited > 30  # several rows of both requests
    if plan == NGRAM:  # a path waited behind other rows
        by_request: dict[str, list[dict[str, Any]]] = {}
        for one in deferred:
            by_request.setdefault(one["request"], []).append(one)
        assert any(
            after["waiting"] > before["waiting"] > 0 and after["emitted"] > before["emitted"] + 1
            for steps in by_request.values()
            for before, after in pairwise(steps)
        )
    # A prompt after which drafting was refused.
    assert any(one["emitted"] == 1 and one["waiting"] >= one["prompt"] for one in deferred)
    assert any(one["computed"] > 64 and not one["waiting"] for one in deferred)


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["request"], one["computed"], one["emitted"]
