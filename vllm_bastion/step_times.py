# SPDX-License-Identifier: Apache-2.0
"""The times of a real step: what a rank measures, and what all ranks learn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """One decode step, milliseconds."""

    rows: int
    num_reqs: int
    context_len: float
    # whether it verified drafts, and whether it ended with a draft
    verified: bool
    drafted: bool
    # the target's forward pass and output head; if nothing was verified, up to the step's end
    forward_ms: float
    # from the end of the previous step to the end of this one; None if that one was not timed
    total_ms: float | None
    # positions of its block that the drafter did not predict
    spared: int = 0
    # whether what it verified are copies alone: the step before it did not draft
    copies: bool = False
    # whether it looked for copies
    looked: bool = False

    @property
    def undrafted(self) -> bool:
        """Whether neither it nor the step before it drafted: a plain step, or one of copies."""
        return not self.drafted and (self.copies or not self.verified)
