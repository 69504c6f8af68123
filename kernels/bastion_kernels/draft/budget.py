# SPDX-License-Identifier: Apache-2.0
"""How many nodes of every tree to verify, given what a step of each size costs.

The nodes of all requests compete by path score. With R active requests, base_rows rows that are not
draft nodes (roots and prefill tokens) and a cost C of the total rows, the n best nodes give

    S(n) = (R + sum of the n best rho) / C(base_rows + n)       tokens per millisecond

which for one request is the paper's S(N) without its constant L_AR. The budget is the smallest n
that maximises S, n = 0 (plain decoding) included; the paper's Algorithm 1, which stops at the first
n whose successor does not improve S, finds the same on a convex cost, not on a staircase.
C is read at all rows of the step, the root's included. The paper's pseudocode counts nodes only;
at the slope of its A100 costs, one row further is one node more in a step of 80 (tests/replay).
`take_best` shares out an n that is already settled.

rho is summed as a multiple of 2^-40, so that the sum does not depend on the order of additions:
every rank of a tensor-parallel group, and the reference, get the same count. A node of rho below
2^-40 adds nothing.

A request's share is the number of its nodes whose rank in the list of all nodes is below n
(`node_ranks.py`). The last of `take_best`'s programs to finish sums the shares to where each
request's rows begin. `choose_budget` scatters rho by rank; a second launch sums along the list,
finds the best n and counts each request's nodes below it. Its R programs repeat the same search,
which is cheaper than a third launch.

Nothing that the compiler specialises on depends on R, so a batch of any size runs what the first
one compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.draft.node_ranks import rank_constants, ranks, sorted_nodes
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_UNIT = 2**40  # units of rho = 1
_BLOCK = 1024  # list entries per round of the search


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
        _, mine, rank = ranks(
            log_rho_ptr, slots_ptr, limits_ptr, reqs, log_rho_s, row, slot,
            N, True, BLOCK, RIVALS, STEPS,
        )  # fmt: skip
        count = tl.sum((mine & (rank < total)).to(tl.int32), 0)
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
        score, mine, rank = ranks(
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
            # entry i of the list is what going from n = i to n = i + 1 adds
            entry = start + tl.arange(0, BLOCK)
            real = entry < most
            gain = tl.load(gain_ptr + entry, mask=real, other=0)
            after = total + tl.cumsum(gain, 0)
            cost = tl.load(cost_ptr + base + 1 + entry, mask=real, other=1.0).to(tl.float64)
            speed = tl.where(real, after.to(tl.float64) / cost, -1.0)
            top = tl.max(speed, 0)
            first = tl.min(tl.where(speed == top, entry + 1, 0x7FFFFFFF), 0)
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


class _ReadsScores(Op):
    __slots__ = ()
    log_rho: Tensor

    def check_scores(self) -> None:
        self.expect("log_rho", (None, None), torch.float32)
        self.expect("slots", (None,), torch.int64)
        self.expect("limits", (self.log_rho.shape[0],), torch.int32)


@dataclass(slots=True)
class ChooseBudget(_ReadsScores):
    """Write how many leading nodes of every request's tree this step should verify.

    Equal scores go to the lower row of the batch. A step larger than the cost table is never
    chosen; where `base_rows` alone is beyond it, every count is 0.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    log_rho: Tensor
    """`[S, N]` fp32, by slot: path scores, non-increasing, -inf where there is no node."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1 for a row that takes no part."""
    limits: Tensor
    """`[S]` int32, the most nodes each slot may have."""
    cost_ms: Tensor
    """`[rows + 1]` fp32, positive: cost of one step of 0..rows target rows."""
    base_rows: int | Tensor
    """Rows of the step that are no draft nodes; an int (frozen by a CUDA graph), or a 0-d int32
    tensor on the device, read there."""
    num_verify: Tensor
    """`[S]` int32, written for the slots of active rows."""
    promised: Tensor | None = None
    """`[S]` fp32 or None, written for the slots of active rows: sum of rho over the request's
    chosen nodes, each rounded down to a multiple of 2^-40."""

    def check(self) -> None:
        self.check_scores()
        self.expect("num_verify", (self.log_rho.shape[0],), torch.int32)
        self.expect("cost_ms", (None,), torch.float32)
        if isinstance(self.base_rows, Tensor):
            self.expect("base_rows", (), torch.int32)
        if self.promised is not None:
            self.expect("promised", (self.log_rho.shape[0],), torch.float32)

    def reference(self) -> None:
        """Sort all nodes, walk down the list, keep the best S."""
        cost, base = self.cost_ms.tolist(), int(self.base_rows)
        active = [slot for slot in self.slots.tolist() if slot >= 0]
        nodes = sorted_nodes(self.log_rho, self.slots, self.limits, torch.finfo(torch.float32).min)
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
            self.num_verify[slot] = counts[slot]
            if self.promised is not None:
                self.promised[slot] = sums[slot] / _UNIT

    def triton(self) -> None:
        """Rank all nodes, then search the list."""
        reqs, (num_slots, limit) = self.slots.shape[0], self.log_rho.shape
        if reqs == 0:
            return
        # Allocated by every call: shared scratch would race between streams and graphs, and scratch
        # first allocated inside a capture would belong to that graph.
        rank = torch.empty((reqs, limit), dtype=torch.int32, device=self.log_rho.device)
        gain = torch.empty(reqs * limit, dtype=torch.int64, device=self.log_rho.device)
        count = torch.empty(reqs, dtype=torch.int32, device=self.log_rho.device)
        _rank_kernel[(reqs,)](
            self.log_rho,
            self.slots,
            self.limits,
            rank,
            gain,
            count,
            reqs,
            self.log_rho.stride(0),
            UNIT=_UNIT,
            **rank_constants(limit),
        )
        block = min(_BLOCK, triton.next_power_of_2(num_slots * limit))
        _choose_kernel[(reqs,)](
            rank,
            gain,
            count,
            self.slots,
            self.cost_ms,
            self.base_rows,
            self.num_verify,
            self.promised,
            reqs,
            self.cost_ms.shape[0],
            N=limit,
            UNIT=_UNIT,
            BASE_ON_DEVICE=isinstance(self.base_rows, Tensor),
            # by the slots, whose number never changes
            REQS_PAD=triton.next_power_of_2(num_slots),
            BLOCK_N=triton.next_power_of_2(limit),
            BLOCK=block,
            num_warps=min(max(block // 128, 1), 8),
        )


choose_budget = public(ChooseBudget, cpu="bastion_kernels.cpu.draft")


@dataclass(slots=True)
class TakeBest(_ReadsScores):
    """Lay out a step of `total` nodes: every request has as many rows as it owns of the best ones.

    For a step whose size the host has settled: exactly min(total, sum of min(limit, N) over the
    active rows) nodes are given, whatever their scores. Columns of score -inf are nodes like any
    other and come last; equal scores go to the lower row.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or a negative total.
    """

    log_rho: Tensor
    """`[S, N]` fp32, by slot: path scores, non-increasing and not NaN."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1 for a row that takes no part."""
    limits: Tensor
    """`[S]` int32, the most nodes each slot may have; none where negative."""
    rest: Tensor
    """`[S]` int32, rows of each slot that are no nodes, its root included."""
    total: int
    """Nodes of the step, at least 0."""
    logits_start: Tensor
    """`[>= R + 1]` int32, written: running sum of root and nodes, from 0."""
    rows_start: Tensor
    """`[>= R + 1]` int32, written: running sum of all rows, from 0."""
    scratch: Tensor
    """`[>= R + 1]` int32; its first number must be 0 and is left so."""

    def check(self) -> None:
        reqs = self.slots.shape[0]
        self.check_scores()
        self.expect("rest", (self.log_rho.shape[0],), torch.int32)
        for name in ("logits_start", "rows_start", "scratch"):
            self.expect(name, (None,), torch.int32)
            room = getattr(self, name).shape[0]
            if room <= reqs:
                raise ValueError(f"{self.name}: {name} must have room for {reqs + 1}, got {room}")
        if self.total < 0:
            raise ValueError(f"{self.name}: total must be at least 0, got {self.total}")

    def reference(self) -> None:
        """Sort all columns, those without a node last, and count."""
        nodes = sorted_nodes(self.log_rho, self.slots, self.limits, -math.inf)
        counts = Counter(slot for _, _, slot in nodes[: self.total])
        self.logits_start[0] = self.rows_start[0] = 0
        for row, slot in enumerate(self.slots.tolist()):
            active = slot >= 0
            self.logits_start[row + 1] = self.logits_start[row] + (
                1 + counts[slot] if active else 0
            )
            self.rows_start[row + 1] = self.rows_start[row] + (
                int(self.rest[slot]) + counts[slot] if active else 0
            )

    def triton(self) -> None:
        """One launch."""
        reqs, (num_slots, limit) = self.slots.shape[0], self.log_rho.shape
        if reqs > 0:
            _take_kernel[(reqs,)](
                self.log_rho,
                self.slots,
                self.limits,
                self.rest,
                self.logits_start,
                self.rows_start,
                self.scratch,
                reqs,
                min(self.total, self.log_rho.numel()),
                self.log_rho.stride(0),
                # by the slots, whose number never changes
                REQS_PAD=triton.next_power_of_2(num_slots),
                **rank_constants(limit),
            )


take_best = public(TakeBest, cpu="bastion_kernels.cpu.draft")
