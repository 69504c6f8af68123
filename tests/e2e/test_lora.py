# SPDX-License-Identifier: Apache-2.0
"""Adapters on the target: each row of a trimmed step gets its own request's.

The drafter knows no adapters. Its drafts are worse for them, and no token differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.adapters import RANK, make_adapter
from tests.e2e.compare import Comparison, leaving_the_chain
from tests.e2e.costs import linear
from tests.e2e.engines import TARGET, Batch, Engine
from tests.e2e.marks import on_cpu

pytestmark = on_cpu("engines on a CPU host")


def adapted(folder: Path, count: int, tokens: int, head: bool = False) -> Batch:
    """Requests with two adapters and without, side by side."""
    adapters = [
        make_adapter(TARGET, folder / name, seed, head) for seed, name in enumerate("ab", 1)
    ]
    batch = Batch("adapters side by side")
    for i, (name, text) in enumerate(cases.some(count, first=12)):
        sampling = {"temperature": 0.8, "seed": 4} if i % 4 == 3 else {"temperature": 0}
        which = i % 3
        own = {} if which == 2 else {"lora": ["ab"[which], which + 1, adapters[which]]}
        batch.add(f"lora-{name}", text, max_tokens=tokens, ignore_eos=True, **sampling, **own)
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(("head", "arms"), [(False, "free"), (True, "free"), (False, "in turns")])
def test_rows_of_a_tree_get_their_requests_adapter(
    compare: Comparison, tmp_path: Path, head: bool, arms: str
) -> None:
    # Room for two adapters, and one more that stays empty: on a CPU, vLLM gives rows without an
    # adapter the last one's weights, unless no row has an adapter.
    plain = Engine(eager=True).of(enable_lora=True, max_loras=3, max_lora_rank=RANK)
    requests = [adapted(tmp_path, 3, 40, head)]
    # Trees of different sizes in one step: budgets follow from costs, given or measured.
    tree = plain.with_bastion(24, costs=None if head else linear(10.0, 0.4))
    setup = [] if arms == "free" else ["tests.e2e.plain_steps:every_arm"]
    expected, run = compare.run(plain, requests), compare.run(tree, requests, setup=setup)
    compare.same(f"adapters, head {head}, arms {arms}", requests, expected, run, plain)
    outcome = run["batches"][0]
    if not head:
        assert any(len(set(step.values())) > 1 for step in outcome["counted"])
    assert leaving_the_chain(outcome["paths"])
