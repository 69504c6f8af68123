# SPDX-License-Identifier: Apache-2.0
"""How many nodes of every tree to verify, given what a step of each size costs.

The nodes of all requests compete by path score. With R active requests, base_rows rows that are no
draft nodes (roots and prefill tokens) and cost C by total rows, taking the n best nodes gives

    S(n) = (R + sum of the n best rho) / C(base_rows + n)       tokens per millisecond

which for one request is the paper's S(N) without its constant L_AR. The budget is the smallest n
that maximises S, n = 0 (plain decoding) included. "first_decrease" stops where the paper's
Algorithm 1 does, at the first n whose successor does not improve S: the same n on a convex cost
(the paper's unimodality of S), not on a staircase.

rho is summed as a multiple of 2^-40, so that the sum does not depend on the order of additions:
every rank of a tensor-parallel group, and the reference, get the same count. A node of rho below
2^-40 adds nothing.

Two launches. `_rank_kernel` gives every node its place in the list of all nodes: each request's
list is sorted already, so a node's place is its own column plus, by binary search, the number of
better nodes in each other request. It scatters rho to that place. `_choose_kernel` sums along the
list, takes the best n, and counts a request's nodes before it; its R programs do the same search,
which is cheaper than a third launch.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from bastion_kernels.checks import check, on_gpu

__all__ = ["choose_budget", "choose_budget_reference", "choose_budget_triton"]

_OP = "choose_budget"
_RULES = ("argmax", "first_decrease")
_UNIT = 2**40  # units of rho = 1
_BLOCK = 1024  # places of the list per round of the search


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
    best_n, best, total = 0, 0.0, len(active) * _UNIT
    for n in range(min(len(nodes) + 1, len(cost) - base)):
        if n > 0:
            total += int(math.exp(-nodes[n - 1][0]) * _UNIT)
        speed = total / cost[base + n]
        if speed > best:
            best_n, best = n, speed
        elif rule == "first_decrease":
            break
    counts = Counter(slot for _, _, slot in nodes[:best_n])
    for _, slot in active:
        num_verify[slot] = counts[slot]


@triton.jit(do_not_specialize=["reqs"])
def _rank_kernel(
    log_rho_ptr,
    slots_ptr,
    limits_ptr,
    rank_ptr,
    gain_ptr,
    count_ptr,
    reqs,
    log_rho_s,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid: (R,). Writes rank [R, N], count [R] (-1: inert) and, by rank, gain [R * N] of rho."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    count = tl.full([], -1, tl.int32)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        mine = column < tl.minimum(tl.load(limits_ptr + slot), N)
        score = tl.load(log_rho_ptr + slot * log_rho_s + column, mask=mine, other=float("-inf"))
        mine = score > float("-inf")
        rank = column
        for other in range(reqs):
            slot = tl.load(slots_ptr + other)
            if (slot >= 0) & (other != row):
                # nodes of the other request before this one: a prefix of its list
                low = tl.zeros([BLOCK], tl.int32)
                high = low + tl.maximum(tl.minimum(tl.load(limits_ptr + slot), N), 0)
                for _ in range(STEPS):
                    middle = (low + high) // 2
                    open = low < high
                    rival_ptr = log_rho_ptr + slot * log_rho_s + middle
                    rival = tl.load(rival_ptr, mask=open, other=float("-inf"))
                    before = (rival > score) | ((rival == score) & (other < row))
                    low = tl.where(open & before, middle + 1, low)
                    high = tl.where(open & (before == 0), middle, high)
                rank += low
        gain = (tl.exp(score.to(tl.float64)) * UNIT).to(tl.int64)
        tl.store(gain_ptr + rank, gain, mask=mine)
        row_ptr = rank_ptr + row.to(tl.int64) * N
        tl.store(row_ptr + column, tl.where(mine, rank, 0x7FFFFFFF), mask=column < N)
        count = tl.sum(mine.to(tl.int32), 0)
    tl.store(count_ptr + row, count)


@triton.jit(do_not_specialize=["reqs", "base_rows"])
def _choose_kernel(
    rank_ptr,
    gain_ptr,
    count_ptr,
    slots_ptr,
    cost_ptr,
    base_rows,
    num_verify_ptr,
    reqs,
    costs,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    BASE_ON_DEVICE: tl.constexpr,
    FIRST_DECREASE: tl.constexpr,
    REQS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R,). Every program finds the budget n; each writes its own request's share."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        base = tl.load(base_rows) if BASE_ON_DEVICE else base_rows
        request = tl.arange(0, REQS_PAD)
        count = tl.load(count_ptr + request, mask=request < reqs, other=-1)
        total = tl.sum((count >= 0).to(tl.int64), 0) * UNIT
        most = tl.minimum(tl.sum(tl.maximum(count, 0), 0), costs - 1 - base)
        plain = tl.load(cost_ptr + base, mask=base < costs, other=1.0).to(tl.float64)
        best = total.to(tl.float64) / plain
        budget = tl.full([], 0, tl.int32)
        going = tl.full([], 1, tl.int32)
        for start in range(0, most, BLOCK):
            # place i of the list holds what going from n = i to n = i + 1 adds
            place = start + tl.arange(0, BLOCK)
            real = place < most
            gain = tl.load(gain_ptr + place, mask=real, other=0)
            after = total + tl.cumsum(gain, 0)
            cost = tl.load(cost_ptr + base + 1 + place, mask=real, other=1.0).to(tl.float64)
            speed = tl.where(real, after.to(tl.float64) / cost, -1.0)
            if FIRST_DECREASE:
                before = tl.load(cost_ptr + base + place, mask=real, other=1.0).to(tl.float64)
                worse = real & (speed <= (after - gain).to(tl.float64) / before)
                stop = tl.min(tl.where(worse, place, 0x7FFFFFFF), 0)
                reached = tl.minimum(stop, tl.minimum(start + BLOCK, most))
                budget = tl.where(going == 1, reached, budget)
                going = tl.where(stop == 0x7FFFFFFF, going, 0)
            else:
                top = tl.max(speed, 0)
                first = tl.min(tl.where(speed == top, place + 1, 0x7FFFFFFF), 0)
                budget = tl.where(top > best, first, budget)
                best = tl.maximum(best, top)
            total += tl.sum(gain, 0)
        column = tl.arange(0, BLOCK_N)
        row_ptr = rank_ptr + row.to(tl.int64) * N
        rank = tl.load(row_ptr + column, mask=column < N, other=0x7FFFFFFF)
        tl.store(num_verify_ptr + slot, tl.sum((rank < budget).to(tl.int32), 0))


def choose_budget_triton(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    rule: str = "argmax",
) -> None:
    """Rank all nodes, then search the list; see `choose_budget`."""
    reqs, limit = slots.shape[0], log_rho.shape[1]
    if reqs == 0:
        return
    rank = torch.empty((reqs, limit), dtype=torch.int32, device=log_rho.device)
    gain = torch.empty(reqs * limit, dtype=torch.int64, device=log_rho.device)
    count = torch.empty(reqs, dtype=torch.int32, device=log_rho.device)
    columns = triton.next_power_of_2(limit)
    _rank_kernel[(reqs,)](
        log_rho,
        slots,
        limits,
        rank,
        gain,
        count,
        reqs,
        log_rho.stride(0),
        N=limit,
        UNIT=_UNIT,
        BLOCK=columns,
        STEPS=limit.bit_length(),
    )
    _choose_kernel[(reqs,)](
        rank,
        gain,
        count,
        slots,
        cost_ms,
        base_rows,
        num_verify,
        reqs,
        cost_ms.shape[0],
        N=limit,
        UNIT=_UNIT,
        BASE_ON_DEVICE=isinstance(base_rows, Tensor),
        FIRST_DECREASE=rule == "first_decrease",
        REQS_PAD=triton.next_power_of_2(reqs),
        BLOCK_N=columns,
        BLOCK=min(_BLOCK, triton.next_power_of_2(reqs * limit)),
    )


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
        base_rows: rows of the step that are no draft nodes; an int (frozen by a CUDA graph), or a
            0-d int32 tensor on the device, read there.
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
    run = choose_budget_triton if on_gpu(log_rho) else choose_budget_reference
    run(log_rho, slots, limits, cost_ms, base_rows, num_verify, rule)
