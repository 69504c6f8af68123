# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers build their own trees and agree on every budget and token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers
from tests.e2e.drafters import REDUCED, make_drafter
from tests.e2e.engines import DRAFTER, Engine, Runner
from tests.e2e.marks import on_cpu, slow

pytestmark = on_cpu("splits the model over CPU workers")

COUNTERS = [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]


@pytest.mark.parametrize(
    ("eager", "kind"),
    [(True, None), slow(False, None), slow(True, REDUCED[0])],
    ids=["eager", "compiled", "reduced vocabulary"],
)
def test_two_workers_give_the_tokens_and_trees_of_one(
    runner: Runner, tmp_path: Path, eager: bool, kind: str | None
) -> None:
    case = "two tensor-parallel workers"
    batch = cases.texts(case, 1, first=3, every=3, seed=3, max_tokens=24, ignore_eos=True)
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
def test_two_workers_verify_alike(compare: Comparison) -> None:
    """Each times its own steps, and the first one's times are those of both."""
    batch = cases.greedy(2, tokens=120)
    plain = Engine(max_num_seqs=3, eager=True)
    two = plain.with_bastion(16, costs=None).of(tensor_parallel_size=2)
    run = compare.run(two, [batch], offline=True)
    expected = answers(compare.run(plain, [batch]))
    assert run["token_ids"] == [expected[request["id"]] for request in batch.requests]
    first, second = run["workers"]
    assert first == second and len(first["costs"][1]) == 129
    assert max(map(sum, first["sizes"])) > 3
