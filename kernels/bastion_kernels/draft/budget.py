# SPDX-License-Identifier: Apache-2.0
"""Choose how many nodes of every tree to verify, from the cost of a step by its size.

The nodes of all requests compete by path score. With R active requests, base_rows rows that are not
draft nodes (roots and prefill tokens) and a cost C of the total rows, the n best nodes give

    S(n) = (R + sum of the n best rho) / C(base_rows + n)       tokens per millisecond

For one request this is the paper's S(N) without its constant L_AR. The budget is the smallest n
that maximises S; n = 0 is plain decoding. The paper's Algorithm 1 stops at the first n whose
successor does not improve S. That is equivalent on a convex cost, but not on a staircase. C is read
at the total number of rows, roots included, while the paper's pseudocode counts nodes only: with
its A100 costs the difference is one node in a step of 80 (tests/replay). `take_best` distributes a
given n.

rho is summed in multiples of 2^-40, so the sum does not depend on the order of additions: all ranks
of a tensor-parallel group and the reference get the same count. A node with rho < 2^-40 adds 0.

A request's share is the number of its nodes whose rank among all nodes is below n (`node_ranks`).
In `take_best`, the last program to finish sums the shares to the first row of each request.
`choose_budget` scatters rho by rank; a second launch sums along the list, finds the best n and
counts each request's nodes below it. Its R programs repeat that search, which is cheaper than a
third launch.

No compile-time argument depends on R, so all batch sizes share one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.draft.node_ranks import rank_constants, ranks
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_UNIT = 2**40  # units of rho = 1
_BLOCK = 1024  # list entries per round of the search


# `slots` may be a slice of a longer batch, with any alignment.
@triton.jit(
    do_not_specialize=["reqs", "total"],
    do_not_specialize_on_alignment=["slots", "logits_start", "rows_start"],
)
def _take_kernel(
    log_rho,
    slots,
    limits,
    rest,
    logits_start,
    rows_start,
    scratch,
    reqs,
    total,
    stride_log_rho_s,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
    REQS_PAD: tl.constexpr,
):
    """Grid: (R,). Counts the request's nodes among the `total` best; the last program sums up."""
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    count = tl.full([], 0, tl.int32)
    if slot >= 0:
        _, m_n, b_rank = ranks(
            log_rho, slots, limits, reqs, stride_log_rho_s, i_r, slot,
            N, True, BLOCK, RIVALS, STEPS,
        )  # fmt: skip
        count = tl.sum((m_n & (b_rank < total)).to(tl.int32), 0)
    p_count = scratch + 1
    tl.store(p_count + i_r, count)
    # the stores of all threads must precede the release by one thread
    tl.debug_barrier()
    arrived = tl.atomic_add(scratch, 1, sem="acq_rel", scope="gpu")
    if arrived == reqs - 1:
        tl.store(scratch, 0)
        o_r = tl.arange(0, REQS_PAD)
        m_r = o_r < reqs
        b_slot = tl.load(slots + o_r, mask=m_r, other=-1)
        m_active = b_slot >= 0
        b_nodes = tl.load(p_count + o_r, mask=m_r, other=0, cache_modifier=".cg")
        b_rest = tl.load(rest + b_slot, mask=m_active, other=0)
        b_logits_end = tl.cumsum(b_nodes + m_active.to(tl.int32), 0)
        b_rows_end = tl.cumsum(b_nodes + b_rest, 0)
        tl.store(logits_start + 1 + o_r, b_logits_end, mask=m_r)
        tl.store(rows_start + 1 + o_r, b_rows_end, mask=m_r)
        tl.store(logits_start, 0)
        tl.store(rows_start, 0)


@triton.jit(do_not_specialize=["reqs"], do_not_specialize_on_alignment=["slots"])
def _rank_kernel(
    log_rho,
    slots,
    limits,
    rank,
    gain,
    counts,
    reqs,
    stride_log_rho_s,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid: (R,). Writes rank [R, N], count [R] (-1: inert) and, by rank, gain [R * N] of rho."""
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    count = tl.full([], -1, tl.int32)
    if slot >= 0:
        b_score, m_n, b_rank = ranks(
            log_rho, slots, limits, reqs, stride_log_rho_s, i_r, slot,
            N, False, BLOCK, RIVALS, STEPS,
        )  # fmt: skip
        b_gain = (tl.exp(b_score.to(tl.float64)) * UNIT).to(tl.int64)
        tl.store(gain + b_rank, b_gain, mask=m_n)
        o_n = tl.arange(0, BLOCK)
        p_rank = rank + i_r.to(tl.int64) * N
        tl.store(p_rank + o_n, tl.where(m_n, b_rank, 0x7FFFFFFF), mask=o_n < N)
        count = tl.sum(m_n.to(tl.int32), 0)
    tl.store(counts + i_r, count)


@triton.jit(
    do_not_specialize=["reqs", "base_rows", "costs"],
    do_not_specialize_on_alignment=["slots", "base_rows"],
)
def _choose_kernel(
    rank,
    gain,
    counts,
    slots,
    cost_ms,
    base_rows,
    num_verify,
    promised,
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
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        base = tl.load(base_rows) if BASE_ON_DEVICE else base_rows
        o_r = tl.arange(0, REQS_PAD)
        b_count = tl.load(counts + o_r, mask=o_r < reqs, other=-1)
        total = tl.sum((b_count >= 0).to(tl.int64), 0) * UNIT
        most = tl.minimum(tl.sum(tl.maximum(b_count, 0), 0), costs - 1 - base)
        plain = tl.load(cost_ms + base, mask=base < costs, other=1.0).to(tl.float64)
        best = total.to(tl.float64) / plain
        budget = tl.full([], 0, tl.int32)
        for start in range(0, most, BLOCK):
            # entry i is the gain from n = i to n = i + 1
            o_i = start + tl.arange(0, BLOCK)
            m_i = o_i < most
            b_gain = tl.load(gain + o_i, mask=m_i, other=0)
            b_after = total + tl.cumsum(b_gain, 0)
            b_cost = tl.load(cost_ms + base + 1 + o_i, mask=m_i, other=1.0).to(tl.float64)
            b_speed = tl.where(m_i, b_after.to(tl.float64) / b_cost, -1.0)
            top = tl.max(b_speed, 0)
            first = tl.min(tl.where(b_speed == top, o_i + 1, 0x7FFFFFFF), 0)
            budget = tl.where(top > best, first, budget)
            best = tl.maximum(best, top)
            total += tl.sum(b_gain, 0)
        o_n = tl.arange(0, BLOCK_N)
        p_rank = rank + i_r.to(tl.int64) * N
        b_rank = tl.load(p_rank + o_n, mask=o_n < N, other=0x7FFFFFFF)
        m_chosen = b_rank < budget
        tl.store(num_verify + slot, tl.sum(m_chosen.to(tl.int32), 0))
        if promised is not None:
            expected = tl.sum(tl.load(gain + b_rank, mask=m_chosen, other=0), 0)
            tl.store(promised + slot, (expected.to(tl.float64) / UNIT).to(tl.float32))


class _ReadsScores(Op):
    __slots__ = ()
    log_rho: Tensor

    def check_scores(self) -> None:
        self.expect("log_rho", (None, None), torch.float32)
        self.expect("slots", (None,), torch.int64)
        self.expect("limits", (self.log_rho.shape[0],), torch.int32)


@dataclass(slots=True)
class ChooseBudget(_ReadsScores):
    """Write how many leading nodes of every request's tree to verify in this step.

    Ties go to the lower row of the batch. The step never exceeds the cost table; if `base_rows`
    alone exceeds it, every count is 0.
    """

    log_rho: Tensor
    """`[S, N]` fp32, by slot: path scores, non-increasing, -inf where there is no node."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1 for an inert row."""
    limits: Tensor
    """`[S]` int32, most nodes of each slot."""
    cost_ms: Tensor
    """`[rows + 1]` fp32, positive: cost of a step of 0..rows target rows, in milliseconds."""
    base_rows: int | Tensor
    """Rows of the step other than draft nodes: an int (frozen by a CUDA graph), or a 0-d int32
    tensor that the kernel reads."""
    num_verify: Tensor
    """`[S]` int32, written for the slots of active rows."""
    promised: Tensor | None = None
    """`[S]` fp32, written for the slots of active rows: sum of rho over the chosen nodes, each
    rounded down to a multiple of 2^-40. None: not written."""

    def check(self) -> None:
        self.check_scores()
        self.expect("num_verify", (self.log_rho.shape[0],), torch.int32)
        self.expect("cost_ms", (None,), torch.float32)
        if isinstance(self.base_rows, Tensor):
            self.expect("base_rows", (), torch.int32)
        if self.promised is not None:
            self.expect("promised", (self.log_rho.shape[0],), torch.float32)

    def triton(self) -> None:
        """Rank all nodes, then search for n."""
        reqs, (num_slots, limit) = self.slots.shape[0], self.log_rho.shape
        if reqs == 0:
            return
        # Allocated by every call: shared scratch would race between streams and graphs, and scratch
        # first allocated inside a capture would belong to that graph.
        rank = torch.empty((reqs, limit), dtype=torch.int32, device=self.log_rho.device)
        gain = torch.empty(reqs * limit, dtype=torch.int64, device=self.log_rho.device)
        count = torch.empty(reqs, dtype=torch.int32, device=self.log_rho.device)
        _rank_kernel[(reqs,)](
            log_rho=self.log_rho,
            slots=self.slots,
            limits=self.limits,
            rank=rank,
            gain=gain,
            counts=count,
            reqs=reqs,
            stride_log_rho_s=self.log_rho.stride(0),
            UNIT=_UNIT,
            **rank_constants(limit),
        )
        block = min(_BLOCK, triton.next_power_of_2(num_slots * limit))
        _choose_kernel[(reqs,)](
            rank=rank,
            gain=gain,
            counts=count,
            slots=self.slots,
            cost_ms=self.cost_ms,
            base_rows=self.base_rows,
            num_verify=self.num_verify,
            promised=self.promised,
            reqs=reqs,
            costs=self.cost_ms.shape[0],
            N=limit,
            UNIT=_UNIT,
            BASE_ON_DEVICE=isinstance(self.base_rows, Tensor),
            # depends on S, which is constant, not on R
            REQS_PAD=triton.next_power_of_2(num_slots),
            BLOCK_N=triton.next_power_of_2(limit),
            BLOCK=block,
            num_warps=min(max(block // 128, 1), 8),
        )


choose_budget = public(ChooseBudget, cpu="bastion_kernels.cpu.draft")


@dataclass(slots=True)
class TakeBest(_ReadsScores):
    """Lay out a step with the `total` best nodes of all requests.

    For a step whose size the host has fixed: exactly min(total, sum of min(limit, N) over the
    active rows) nodes are taken, whatever their scores. Columns of score -inf count as nodes and
    come last. Ties go to the lower row.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or a negative total.
    """

    log_rho: Tensor
    """`[S, N]` fp32, by slot: path scores, non-increasing and not NaN."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1 for an inert row."""
    limits: Tensor
    """`[S]` int32, most nodes of each slot; a negative limit counts as 0."""
    rest: Tensor
    """`[S]` int32, rows of each slot other than nodes, its root included."""
    total: int
    """Nodes of the step, at least 0."""
    logits_start: Tensor
    """`[>= R + 1]` int32, written: running sum of root and nodes, from 0."""
    rows_start: Tensor
    """`[>= R + 1]` int32, written: running sum of all rows, from 0."""
    scratch: Tensor
    """`[>= R + 1]` int32; its first element is 0 before and after."""

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

    def triton(self) -> None:
        reqs, (num_slots, limit) = self.slots.shape[0], self.log_rho.shape
        if reqs > 0:
            _take_kernel[(reqs,)](
                log_rho=self.log_rho,
                slots=self.slots,
                limits=self.limits,
                rest=self.rest,
                logits_start=self.logits_start,
                rows_start=self.rows_start,
                scratch=self.scratch,
                reqs=reqs,
                total=min(self.total, self.log_rho.numel()),
                stride_log_rho_s=self.log_rho.stride(0),
                # depends on S, which is constant, not on R
                REQS_PAD=triton.next_power_of_2(num_slots),
                **rank_constants(limit),
            )


take_best = public(TakeBest, cpu="bastion_kernels.cpu.draft")
