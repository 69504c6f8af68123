# SPDX-License-Identifier: Apache-2.0
"""How many nodes of every tree to verify, given what a step of each size costs.

The nodes of all requests compete by path score. With R active requests, base_rows rows that are no
draft nodes (roots and prefill tokens) and cost C by total rows, taking the n best nodes gives

    S(n) = (R + sum of the n best rho) / C(base_rows + n)       tokens per millisecond

which for one request is the paper's S(N) without its constant L_AR. The budget is the smallest n
that maximises S, n = 0 (plain decoding) included. "first_decrease" stops where the paper's
Algorithm 1 does, at the first n whose successor does not improve S: the same n on a convex cost
(Proposition 3), not on a staircase.

rho is summed as a multiple of 2^-40, so that the sum does not depend on the order of additions:
every rank of a tensor-parallel group, and the reference, get the same count. A node of rho below
2^-40 adds nothing.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bastion_kernels.checks import check

__all__ = ["choose_budget", "choose_budget_reference"]

_OP = "choose_budget"
_RULES = ("argmax", "first_decrease")
_UNIT = 2.0**40  # units of rho = 1


def choose_budget_reference(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    rule: str = "argmax",
) -> None:
    """Sort all nodes, walk down the list, keep the best S; see `choose_budget`."""
    cost, base = cost_ms.tolist(), int(base_rows)
    active = [(r, slot) for r, slot in enumerate(slots.tolist()) if slot >= 0]
    nodes: list[tuple[float, int, int]] = []  # -log rho, row, slot: ties go to the lower row
    for r, slot in active:
        scores = log_rho[slot, : max(int(limits[slot]), 0)].tolist()
        nodes += [(-score, r, slot) for score in scores if score > -math.inf]
    nodes.sort()
    best_n, best, total = 0, 0.0, len(active) * int(_UNIT)
    for n in range(min(len(nodes) + 1, len(cost) - base)):
        if n > 0:
            total += int(math.exp(-nodes[n - 1][0]) * _UNIT)
        speed = total / cost[base + n]
        if speed > best:
            best_n, best = n, speed
        elif rule == "first_decrease":
            break
    for _, slot in active:
        num_verify[slot] = sum(owner == slot for _, _, owner in nodes[:best_n])


def choose_budget(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    rule: Literal["argmax", "first_decrease"] = "argmax",
) -> None:
    """Write how many leading nodes of every request's tree this step should verify.

    Equal scores go to the lower row of the batch. A step larger than the cost table is never
    chosen; where `base_rows` alone is beyond it, every count is 0.

    Args:
        log_rho: `[S, N]` fp32, by slot: path scores, non-increasing, -inf where there is no node.
        slots: `[R]` int64, request slot of each row, or -1 for a row that takes no part.
        limits: `[S]` int32, the most nodes each slot may have.
        cost_ms: `[rows + 1]` fp32, positive: cost of one step of 0..rows target rows.
        base_rows: rows of the step that are no draft nodes; an int, or a 0-d int32 tensor on the
            device, read there.
        num_verify: `[S]` int32, written for the slots of active rows.
        rule: "argmax" or "first_decrease".

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or an unknown rule.
    """
    num_slots, limit = log_rho.shape
    check(_OP, "log_rho", log_rho, (num_slots, limit), torch.float32)
    check(_OP, "slots", slots, (None,), torch.int64)
    check(_OP, "limits", limits, (num_slots,), torch.int32)
    check(_OP, "cost_ms", cost_ms, (None,), torch.float32)
    check(_OP, "num_verify", num_verify, (num_slots,), torch.int32)
    if isinstance(base_rows, Tensor):
        check(_OP, "base_rows", base_rows, (), torch.int32)
    if rule not in _RULES:
        raise ValueError(f'{_OP}: rule must be one of {", ".join(_RULES)}, got "{rule}"')
    choose_budget_reference(log_rho, slots, limits, cost_ms, base_rows, num_verify, rule)
