# SPDX-License-Identifier: Apache-2.0
"""The division of a step's nodes among requests."""

from __future__ import annotations

from collections import Counter

from bastion_kernels.draft.take_best import TakeBest
from tests.references.declare import of


@of(TakeBest)
def take_best(op: TakeBest) -> None:
    nodes = []
    for row, slot in enumerate(op.slots.tolist()):
        if slot >= 0:
            scores = op.log_rho[slot, : max(int(op.limits[slot]), 0)].tolist()
            nodes += [(-score, row, slot) for score in scores]
    counts = Counter(slot for _, _, slot in sorted(nodes)[: op.total])
    op.logits_start[0] = op.rows_start[0] = 0
    for row, slot in enumerate(op.slots.tolist()):
        active = slot >= 0
        logits, rows = 1 + counts[slot], int(op.rest[slot]) + counts[slot]
        op.logits_start[row + 1] = op.logits_start[row] + logits * active
        op.rows_start[row + 1] = op.rows_start[row] + rows * active
