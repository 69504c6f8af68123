# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers build their own trees and agree on every budget and token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.drafters import REDUCED, make_drafter
from tests.e2e.engines import DRAFTER, Batch, Engine, Runner
from tests.e2e.marks import on_cpu, slow

pytestmark = on_cpu("splits the model over CPU workers")

COUNTERS = [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]


def generate(runner: Runner, engine: Engine, batch: Batch, **spec_keys: Any) -> dict[str, Any]:
    """Run two workers with the offline API, each in its own process."""
    return runner.run(engine.of(tensor_parallel_size=2), [batch], offline=True, **spec_keys)


@pytest.mark.parametrize(
    ("eager", "kind"),
    [(True, None), slow(False, None), slow(True, REDUCED[0])],
    ids=["eager", "compiled", "reduced vocabulary"],
)
def test_two_workers_give_the_tokens_and_trees_of_one(
    runner: Runner, tmp_path: Path, eager: bool, kind: str | None
) -> None:
    case = "two tensor-parallel workers"
    batch = cases.texts(case, 1, first=3, every=3, seed=3, max_tokens=40, ignore_eos=True)
    # A fixed budget: an adaptive one depends on times.
    plain = Engine(max_num_seqs=3, eager=eager)
    drafter = make_drafter(kind, tmp_path / "drafter") if kind else DRAFTER
    bastion = plain.with_bastion(16, 16, model=drafter)
    # What is learned of copies depends on batches. An engine core of this process starts with all
    # requests; another process may start with the first one. Compiled workers are spawned.
    alike = {"offline": True, "in_process": True}
    two = runner.run(bastion.of(tensor_parallel_size=2), [batch], spawn=not eager, **alike)
    one = runner.run(bastion, [batch], **alike)
    expected = runner.run(plain, [batch])["batches"][0]
    tokens = [expected["requests"][request["id"]]["token_ids"] for request in batch.requests]
    assert two["token_ids"] == tokens
    # Each worker has half of the drafter's head and grows the tree that one worker would grow.
    counts, expected_counts = (
        [run["metrics"][f"vllm:{n}"] for n in COUNTERS] for run in (two, one)
    )
    assert counts == expected_counts
    drafts, _, accepted = counts
    assert accepted > drafts > 0


@pytest.mark.slow
def test_two_workers_have_the_same_costs(runner: Runner) -> None:
    """Two measurements always differ; the workers' costs are equal to the last bit."""
    engine = Engine(max_num_seqs=3, eager=True).with_bastion(16, costs=None)
    believed = generate(runner, engine, cases.greedy(1, tokens=4))["costs"]
    assert len(believed) == 2 and len(believed[0]) == 129
    assert believed[0] == believed[1]


@pytest.mark.slow
def test_two_workers_learn_the_same_from_the_first_ones_clock(runner: Runner) -> None:
    """Step times go to the scheduler and come back to both workers."""
    engine = Engine(max_num_seqs=2, eager=True).with_bastion(16)
    batch = cases.greedy(6, tokens=120)
    result = generate(runner, engine, batch, slows_down=True)
    before, after = result["corrections"]
    assert before[0] == before[1] and after[0] == after[1]
    # At the given costs no step need be plain. The machine may be faster in the second half.
    slower = [after[0][kind] / before[0][kind] for kind in ("copies", "tree")]
    assert min(slower) > 1.5, (before, after)
