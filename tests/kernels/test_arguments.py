# SPDX-License-Identifier: Apache-2.0
"""Ops name the argument that has another type, or a number that does not fit."""

from __future__ import annotations

import pytest
from op_helpers import names_wrong_arguments, refuses

from bastion_kernels import bind_slots, expand_best_first, gather_rows, take_best, topk_logprobs
from benchmarks.ops.sizes import SMALL
from benchmarks.ops.step import Step


@pytest.fixture(scope="module")
def step() -> Step:
    """Arguments of every op of a step that fit together."""
    return Step(SMALL, 2, 9, 4, "cpu")


def test_wrong_arguments_are_named(step: Step) -> None:
    assert len(step.ops) > 9
    for op, given, _ in step.ops.values():
        names_wrong_arguments(op, *given)


def test_numbers_that_do_not_fit_are_named(step: Step) -> None:
    _, (logits, _, *top), _ = step.ops["topk"]
    refuses(r"k must be in 1\.\.3, got 4", topk_logprobs, logits[:, :3], 4, *top)
    refuses(r"k must be in 1\.\.257, got 0", topk_logprobs, logits, 0, *(t[:, :0] for t in top))
    _, (tokens, rows, _, *rest), _ = step.ops["expand by transitions"]
    refuses("top_k >= 1", expand_best_first, tokens, rows, 0, *rest)
    refuses("got 0, 0", expand_best_first, tokens[:, :0], rows[:, :0], 2, *rest)
    refuses("P is 1 or M = 4, got 2", expand_best_first, tokens, rows[:, :, :2], 2, *rest)
    _, (*given, _, starts, ends, scratch), _ = step.ops["size"]
    refuses("total must be at least 0, got -1", take_best, *given, -1, starts, ends, scratch)
    refuses("rows_start must have shape", take_best, *given, 1, starts, ends[:1], scratch)
    _, (slots, bound, tails, starts), _ = step.ops["bind_tails"]
    refuses("tail_lens must have shape", bind_slots, slots, bound, tails[:1], starts)
    _, (sources, chosen, outs), _ = step.ops["gather"]
    refuses("0 outs, not 5", gather_rows, sources, chosen, [])
    refuses("outs must have columns", gather_rows, sources, chosen, [out.double() for out in outs])
    refuses("outs must have shape", gather_rows, sources, chosen, [out[:0] for out in outs])
