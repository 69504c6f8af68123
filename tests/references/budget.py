# SPDX-License-Identifier: Apache-2.0
"""The budget of a step, in exact arithmetic, and its division among requests."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import torch

from bastion_kernels.draft.budget import ChooseBudget, TakeBest
from tests.references.declare import of

_UNIT = 2**40  # units of rho = 1


def _sorted_nodes(op: Any, least: float) -> list[tuple[float, int]]:
    """log rho and slot of every node of at least that score, best first, ties by row."""
    nodes = []
    for row, slot in enumerate(op.slots.tolist()):
        if slot >= 0:
            scores = op.log_rho[slot, : max(int(op.limits[slot]), 0)].tolist()
            nodes += [(-score, row, slot) for score in scores if score >= least]
    return [(-cost, slot) for cost, _, slot in sorted(nodes)]


@of(ChooseBudget)
def choose_budget(op: ChooseBudget) -> None:
    """S for every n."""
    cost, base = op.cost_ms.tolist(), int(op.base_rows)
    active = [slot for slot in op.slots.tolist() if slot >= 0]
    nodes = _sorted_nodes(op, torch.finfo(torch.float32).min)
    gains = [int(math.exp(score) * _UNIT) for score, _ in nodes]
    best_n, best, total = 0, Fraction(0), len(active) * _UNIT
    for n in range(min(len(nodes) + 1, len(cost) - base)):
        total += gains[n - 1] if n else 0
        speed = Fraction(total) / Fraction(cost[base + n])
        if speed > best:
            best_n, best = n, speed
    for slot in active:
        chosen = [gain for gain, (_, own) in zip(gains[:best_n], nodes) if own == slot]
        op.num_verify[slot] = len(chosen)
        if op.promised is not None:
            op.promised[slot] = sum(chosen) / _UNIT


@of(TakeBest)
def take_best(op: TakeBest) -> None:
    counts = Counter(slot for _, slot in _sorted_nodes(op, -math.inf)[: op.total])
    op.logits_start[0] = op.rows_start[0] = 0
    for row, slot in enumerate(op.slots.tolist()):
        active = slot >= 0
        logits, rows = 1 + counts[slot], int(op.rest[slot]) + counts[slot]
        op.logits_start[row + 1] = op.logits_start[row] + logits * active
        op.rows_start[row + 1] = op.rows_start[row] + rows * active
