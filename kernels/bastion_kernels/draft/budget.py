# SPDX-License-Identifier: Apache-2.0
"""How many nodes of every tree to verify, given what a step of each size costs.

The nodes of all requests compete by path score. With R active requests, base_rows rows that are no
draft nodes (roots and prefill tokens) and cost C by total rows, taking the n best nodes gives

    S(n) = (R + sum of the n best rho) / C(base_rows + n)       tokens per millisecond

which for one request is the paper's S(N) without its constant L_AR. The budget is the smallest n
that maximises S, n = 0 (plain decoding) included; the paper's Algorithm 1, which stops at the first
n whose successor does not improve S, finds the same on a convex cost, not on a staircase.
`take_best` is for a step whose n is settled already: it only shares n out.

rho is summed as a multiple of 2^-40, so that the sum does not depend on the order of additions:
every rank of a tensor-parallel group, and the reference, get the same count. A node of rho below
2^-40 adds nothing.

With every node's place in the list of all nodes (`node_places.py`), a request's share is counted;
of `take_best`'s programs the last to arrive sums the shares to where each request's rows begin.
`choose_budget` scatters rho by place, and a second launch sums along the list, takes the best n,
and counts a request's nodes before it; its R programs do the same search, which is cheaper than a
third launch.

Nothing that the compiler specialises on depends on R, so a batch of any size runs what the first
one compiled.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from bastion_kernels.checks import check, version_for
from bastion_kernels.cpu.draft import choose_budget_cpu, take_best_cpu
from bastion_kernels.draft.node_places import place_constants, places, sorted_nodes
from bastion_kernels.triton_or_none import tl, triton

__all__ = [
    "choose_budget",
    "choose_budget_reference",
    "choose_budget_triton",
    "take_best",
    "take_best_reference",
    "take_best_triton",
]

_UNIT = 2**40  # units of rho = 1
_BLOCK = 1024  # places of the list per round of the search


def choose_budget_reference(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    promised: Tensor | None = None,
) -> None:
    """Sort all nodes, walk down the list, keep the best S; see `choose_budget`."""
    cost, base = cost_ms.tolist(), int(base_rows)
    active = [slot for slot in slots.tolist() if slot >= 0]
    nodes = sorted_nodes(log_rho, slots, limits, torch.finfo(torch.float32).min)
    gains = [int(math.exp(-cost) * _UNIT) for cost, _, _ in nodes]
    best_n, best, total = 0, 0.0, len(active) * _UNIT
    for n in range(min(len(nodes) + 1, len(cost) - base)):
        if n > 0:
            total += gains[n - 1]
        speed = total / cost[base + n]
        if speed > best:
            best_n, best = n, speed
    counts, sums = Counter[int](), Counter[int]()
    for (_, _, slot), gain in zip(nodes[:best_n], gains):
        counts[slot] += 1
        sums[slot] += gain
    for slot in active:
        num_verify[slot] = counts[slot]
        if promised is not None:
            promised[slot] = sums[slot] / _UNIT


def take_best_reference(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    rest: Tensor,
    total: int,
    logits_start: Tensor,
    rows_start: Tensor,
    scratch: Tensor,
) -> None:
    """Sort all columns, those without a node last, and count; see `take_best`."""
    nodes = sorted_nodes(log_rho, slots, limits, -math.inf)
    counts = Counter(slot for _, _, slot in nodes[:total])
    logits_start[0] = rows_start[0] = 0
    for row, slot in enumerate(slots.tolist()):
        active = slot >= 0
        logits_start[row + 1] = logits_start[row] + (1 + counts[slot] if active else 0)
        rows_start[row + 1] = rows_start[row] + (int(rest[slot]) + counts[slot] if active else 0)


# `slots` may be a slice of a longer batch, at any address.
@triton.jit(
    do_not_specialize=["reqs", "total"],
    do_not_specialize_on_alignment=["slots_ptr", "logits_start_ptr", "rows_start_ptr"],
)
def _take_kernel(
    log_rho_ptr,
    slots_ptr,
    limits_ptr,
    rest_ptr,
    logits_start_ptr,
    rows_start_ptr,
    scratch_ptr,
    reqs,
    total,
    log_rho_s,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
    REQS_PAD: tl.constexpr,
):
    """Grid: (R,). Counts the request's nodes among the `total` best; the last one sums up."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    count = tl.full([], 0, tl.int32)
    if slot >= 0:
        _, mine, place = places(
            log_rho_ptr, slots_ptr, limits_ptr, reqs, log_rho_s, row, slot,
            N, True, BLOCK, RIVALS, STEPS,
        )  # fmt: skip
        count = tl.sum((mine & (place < total)).to(tl.int32), 0)
    count_ptr = scratch_ptr + 1
    tl.store(count_ptr + row, count)
    # all threads' stores come before the one thread's release
    tl.debug_barrier()
    arrived = tl.atomic_add(scratch_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == reqs - 1:
        tl.store(scratch_ptr, 0)
        one = tl.arange(0, REQS_PAD)
        live = one < reqs
        owner = tl.load(slots_ptr + one, mask=live, other=-1)
        active = owner >= 0
        nodes = tl.load(count_ptr + one, mask=live, other=0, cache_modifier=".cg")
        rest = tl.load(rest_ptr + owner, mask=active, other=0)
        logits_end = tl.cumsum(nodes + active.to(tl.int32), 0)
        rows_end = tl.cumsum(nodes + rest, 0)
        tl.store(logits_start_ptr + 1 + one, logits_end, mask=live)
        tl.store(rows_start_ptr + 1 + one, rows_end, mask=live)
        tl.store(logits_start_ptr, 0)
        tl.store(rows_start_ptr, 0)


@triton.jit(do_not_specialize=["reqs"], do_not_specialize_on_alignment=["slots_ptr"])
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
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid: (R,). Writes rank [R, N], count [R] (-1: inert) and, by rank, gain [R * N] of rho."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    count = tl.full([], -1, tl.int32)
    if slot >= 0:
        score, mine, rank = places(
            log_rho_ptr, slots_ptr, limits_ptr, reqs, log_rho_s, row, slot,
            N, False, BLOCK, RIVALS, STEPS,
        )  # fmt: skip
        gain = (tl.exp(score.to(tl.float64)) * UNIT).to(tl.int64)
        tl.store(gain_ptr + rank, gain, mask=mine)
        column = tl.arange(0, BLOCK)
        row_ptr = rank_ptr + row.to(tl.int64) * N
        tl.store(row_ptr + column, tl.where(mine, rank, 0x7FFFFFFF), mask=column < N)
        count = tl.sum(mine.to(tl.int32), 0)
    tl.store(count_ptr + row, count)


@triton.jit(
    do_not_specialize=["reqs", "base_rows", "costs"],
    do_not_specialize_on_alignment=["slots_ptr", "base_rows"],
)
def _choose_kernel(
    rank_ptr,
    gain_ptr,
    count_ptr,
    slots_ptr,
    cost_ptr,
    base_rows,
    num_verify_ptr,
    promised_ptr,
    reqs,
    costs,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    BASE_ON_DEVICE: tl.constexpr,
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
        for start in range(0, most, BLOCK):
            # place i of the list holds what going from n = i to n = i + 1 adds
            place = start + tl.arange(0, BLOCK)
            real = place < most
            gain = tl.load(gain_ptr + place, mask=real, other=0)
            after = total + tl.cumsum(gain, 0)
            cost = tl.load(cost_ptr + base + 1 + place, mask=real, other=1.0).to(tl.float64)
            speed = tl.where(real, after.to(tl.float64) / cost, -1.0)
            top = tl.max(speed, 0)
            first = tl.min(tl.where(speed == top, place + 1, 0x7FFFFFFF), 0)
            budget = tl.where(top > best, first, budget)
            best = tl.maximum(best, top)
            total += tl.sum(gain, 0)
        column = tl.arange(0, BLOCK_N)
        row_ptr = rank_ptr + row.to(tl.int64) * N
        rank = tl.load(row_ptr + column, mask=column < N, other=0x7FFFFFFF)
        chosen = rank < budget
        tl.store(num_verify_ptr + slot, tl.sum(chosen.to(tl.int32), 0))
        if promised_ptr is not None:
            gain = tl.sum(tl.load(gain_ptr + rank, mask=chosen, other=0), 0)
            tl.store(promised_ptr + slot, (gain.to(tl.float64) / UNIT).to(tl.float32))


def choose_budget_triton(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    promised: Tensor | None = None,
) -> None:
    """Rank all nodes, then search the list; see `choose_budget`."""
    reqs, (num_slots, limit) = slots.shape[0], log_rho.shape
    if reqs == 0:
        return
    # Allocated anew: kept scratch would tie calls of different streams and graphs together, and
    # one first made inside a capture would belong to that graph.
    rank = torch.empty((reqs, limit), dtype=torch.int32, device=log_rho.device)
    gain = torch.empty(reqs * limit, dtype=torch.int64, device=log_rho.device)
    count = torch.empty(reqs, dtype=torch.int32, device=log_rho.device)
    _rank_kernel[(reqs,)](
        log_rho,
        slots,
        limits,
        rank,
        gain,
        count,
        reqs,
        log_rho.stride(0),
        UNIT=_UNIT,
        **place_constants(limit),
    )
    block = min(_BLOCK, triton.next_power_of_2(num_slots * limit))
    _choose_kernel[(reqs,)](
        rank,
        gain,
        count,
        slots,
        cost_ms,
        base_rows,
        num_verify,
        promised,
        reqs,
        cost_ms.shape[0],
        N=limit,
        UNIT=_UNIT,
        BASE_ON_DEVICE=isinstance(base_rows, Tensor),
        # by the slots, of which there are as many in every call
        REQS_PAD=triton.next_power_of_2(num_slots),
        BLOCK_N=triton.next_power_of_2(limit),
        BLOCK=block,
        num_warps=min(max(block // 128, 1), 8),
    )


def take_best_triton(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    rest: Tensor,
    total: int,
    logits_start: Tensor,
    rows_start: Tensor,
    scratch: Tensor,
) -> None:
    """One launch; see `take_best`."""
    reqs, (num_slots, limit) = slots.shape[0], log_rho.shape
    if reqs > 0:
        _take_kernel[(reqs,)](
            log_rho,
            slots,
            limits,
            rest,
            logits_start,
            rows_start,
            scratch,
            reqs,
            min(total, log_rho.numel()),
            log_rho.stride(0),
            # by the slots, of which there are as many in every call
            REQS_PAD=triton.next_power_of_2(num_slots),
            **place_constants(limit),
        )


def _check_trees(op: str, log_rho: Tensor, slots: Tensor, limits: Tensor) -> None:
    check(op, "log_rho", log_rho, (None, None), torch.float32)
    check(op, "slots", slots, (None,), torch.int64)
    check(op, "limits", limits, (log_rho.shape[0],), torch.int32)


def choose_budget(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    promised: Tensor | None = None,
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
        promised: `[S]` fp32 or None, written for the slots of active rows: sum of rho over the
            request's chosen nodes, each rounded down to a multiple of 2^-40.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op = "choose_budget"
    _check_trees(op, log_rho, slots, limits)
    check(op, "num_verify", num_verify, (log_rho.shape[0],), torch.int32)
    check(op, "cost_ms", cost_ms, (None,), torch.float32)
    if isinstance(base_rows, Tensor):
        check(op, "base_rows", base_rows, (), torch.int32)
    if promised is not None:
        check(op, "promised", promised, (log_rho.shape[0],), torch.float32)
    run = version_for(log_rho, choose_budget_triton, choose_budget_cpu, choose_budget_reference)
    run(log_rho, slots, limits, cost_ms, base_rows, num_verify, promised)


def take_best(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    rest: Tensor,
    total: int,
    logits_start: Tensor,
    rows_start: Tensor,
    scratch: Tensor,
) -> None:
    """Lay out a step of `total` nodes: every request has as many rows as it owns of the best ones.

    For a step whose size the host has settled: exactly min(total, sum of min(limit, N) over the
    active rows) nodes are given, whatever their scores. Columns of score -inf are nodes like any
    other and come last; equal scores go to the lower row.

    Args:
        log_rho: `[S, N]` fp32, by slot: path scores, non-increasing and not NaN.
        slots: `[R]` int64, request slot of each row, or -1 for a row that takes no part.
        limits: `[S]` int32, the most nodes each slot may have; none where negative.
        rest: `[S]` int32, rows of each slot that are no nodes, its root included.
        total: nodes of the step, at least 0.
        logits_start: `[>= R + 1]` int32, written: running sum of root and nodes, from 0.
        rows_start: `[>= R + 1]` int32, written: running sum of all rows, from 0.
        scratch: `[>= R + 1]` int32; its first number must be 0 and is left so.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or a negative total.
    """
    op, reqs = "take_best", slots.shape[0]
    _check_trees(op, log_rho, slots, limits)
    check(op, "rest", rest, (log_rho.shape[0],), torch.int32)
    for name, out in (
        ("logits_start", logits_start),
        ("rows_start", rows_start),
        ("scratch", scratch),
    ):
        check(op, name, out, (None,), torch.int32)
        if out.shape[0] <= reqs:
            raise ValueError(f"{op}: {name} must have room for {reqs + 1}, got {out.shape[0]}")
    if total < 0:
        raise ValueError(f"{op}: total must be at least 0, got {total}")
    run = version_for(log_rho, take_best_triton, take_best_cpu, take_best_reference)
    run(log_rho, slots, limits, rest, total, logits_start, rows_start, scratch)
