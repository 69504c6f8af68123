# SPDX-License-Identifier: Apache-2.0
"""The questions, in the order in which later ones depend on earlier ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        decides: what its answer decides.
        limit_s: it is interrupted after so long.
        needs_s: expected seconds, an estimate; it is not begun with less than half of that left.
        pair: a pair of `benchmarks.widen` that it reads.
        timed: whether nothing may run beside it.
    """

    name: str
    title: str
    decides: str
    limit_s: float
    needs_s: float
    pair: str | None = None
    timed: bool = True

    @property
    def function(self) -> str:
        """`module:name` of what is called with a `Job`."""
        return f"benchmarks.gpu.quarter.{self.name}:ask"


QUESTIONS = (
    Question(
        "tokens",
        "Are the tokens plain decoding's, with graphs and asynchronous scheduling?",
        "whether any time below is worth anything",
        limit_s=150,
        needs_s=140,
        timed=False,
    ),
    Question(
        "adaptive",
        "Does the adaptive budget reach the best fixed one at the 4B shape?",
        "whether the controller needs another mend, and which rows cost more than the profile says",
        limit_s=420,
        needs_s=330,
        pair="4B",
    ),
    Question(
        "real",
        "Do trees pay with a real chat model on real text, and do copies of the context?",
        "README's GPU table, and whether `bastion_lookup` may stay on by default on a GPU",
        limit_s=560,
        needs_s=400,
        pair="smollm2-4B",
    ),
    Question(
        "defaults",
        "Does an 8B shape start and decode with all of vLLM's defaults?",
        "whether the defaults may stay: memory of the warm-up beside what `check` calculates, "
        "seconds to start, what the graphs of trees and of plain steps take, and what a step costs "
        "at 33 and 64 requests, the first and the last of the draft's graphs beyond the target's",
        limit_s=150,
        needs_s=110,
    ),
    Question(
        "experts",
        "Is the profile's plain step right for a mixture of experts?",
        "whether calibration must draw its tokens at random: dummy batches may visit fewer experts",
        limit_s=220,
        needs_s=170,
    ),
    Question(
        "host",
        "How much host time does a step have?",
        "whether host code is worth work: with the tiny pair a step is little else",
        limit_s=100,
        needs_s=70,
    ),
    Question(
        "ops",
        "Which device ops miss their bars?",
        "which kernels to tune: attention by head size and for fp8 caches, the plan, vLLM's input "
        "kernel, gated delta trees, top-p",
        limit_s=120,
        needs_s=80,
    ),
    Question(
        "drafter",
        "Does an fp8 drafter pay?",
        "whether docs may recommend it: draft time against tokens lost",
        limit_s=150,
        needs_s=110,
        pair="4B",
    ),
)
