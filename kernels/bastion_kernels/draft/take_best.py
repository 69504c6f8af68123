# SPDX-License-Identifier: Apache-2.0
"""Lay out a step with the best nodes of all requests.

Each request's nodes are sorted by path score. A node's rank is its own column plus, by binary
search, the number of better nodes in every other request; ties go to the lower row, so the ranks
are a permutation of 0, 1, .. and equal on all ranks of a tensor-parallel group. A search is a chain
of log2(N) loads; several requests are searched in parallel to overlap the chains. A request gets as
many nodes as have a rank below the step's total, which in its tree are the first ones. The last
program to finish sums them up to the first row of each request.

No compile-time argument depends on R, so all batch sizes share one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def _ranks(
    log_rho,
    slots,
    limits,
    reqs,
    stride_log_rho_s,
    i_r,
    slot,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Node mask and rank among all nodes of each column of one request, `[BLOCK]` each.

    The request is row `i_r` of the batch, in `slot`. Ranks outside the mask are undefined.
    """
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < tl.minimum(tl.load(limits + slot), N)
    b_score = tl.load(log_rho + slot * stride_log_rho_s + o_n, mask=m_n, other=float("-inf"))
    b_ahead = tl.zeros([RIVALS, BLOCK], tl.int32)
    for start in range(0, tl.where(reqs > 1, reqs, 0), RIVALS):
        o_other = start + tl.arange(0, RIVALS)
        m_rival = (o_other < reqs) & (o_other != i_r)
        b_slot = tl.load(slots + o_other, mask=m_rival, other=-1)
        b_nodes = tl.load(limits + b_slot, mask=b_slot >= 0, other=0)
        b_nodes = tl.minimum(b_nodes, N)[:, None]
        p_list = log_rho + (b_slot * stride_log_rho_s)[:, None] - 1
        m_wins = (o_other < i_r)[:, None]
        # number of the other request's nodes before this one, from the highest bit down
        b_found = tl.zeros([RIVALS, BLOCK], tl.int32)
        for step in range(STEPS):
            b_candidate = b_found + (1 << (STEPS - 1 - step))
            # NaN past the end compares false
            b_theirs = tl.load(
                p_list + b_candidate, mask=b_candidate <= b_nodes, other=float("nan")
            )
            m_before = (b_theirs > b_score[None, :]) | ((b_theirs == b_score[None, :]) & m_wins)
            b_found = tl.where(m_before, b_candidate, b_found)
        b_ahead += b_found
    return m_n, o_n + tl.sum(b_ahead, 0)


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
        m_n, b_rank = _ranks(
            log_rho, slots, limits, reqs, stride_log_rho_s, i_r, slot, N, BLOCK, RIVALS, STEPS
        )
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


def _rank_constants(limit: int) -> dict[str, int]:
    """Constants and warps of a kernel that calls `_ranks`. They depend on N, never on R.

    A thread runs at most 8 searches: more would run out of registers.
    """
    block = triton.next_power_of_2(limit)
    return {
        "N": limit,
        "BLOCK": block,
        "RIVALS": min(max(2048 // block, 1), 16),
        "STEPS": limit.bit_length(),
        "num_warps": min(max(block // 16, 1), 8),
    }


@dataclass(slots=True)
class TakeBest(Op):
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
        self.expect("log_rho", (None, None), torch.float32)
        self.expect("slots", (None,), torch.int64)
        self.expect("limits", (self.log_rho.shape[0],), torch.int32)
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
                **_rank_constants(limit),
            )


take_best = public(TakeBest, cpu="bastion_kernels.cpu.draft")
