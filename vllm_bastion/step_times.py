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
