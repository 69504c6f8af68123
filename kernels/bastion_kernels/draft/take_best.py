# SPDX-License-Identifier: Apache-2.0
"""Lay out a step with the best nodes of all requests.

Each request's nodes are sorted by path score. A node's rank is its own column plus, by binary
search, the number of better nodes in every other request; ties go to the lower row, so all ranks of
a tensor-parallel group find the same. A request gets as many nodes as have a rank below the step's
total, which in its tree are the first ones. The last program to finish sums them up to the first
row of each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.bound import Launched
from bastion_kernels.op import Op, padded, public
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
    do_not_specialize=["R", "total"],
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
    R,
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
            log_rho, slots, limits, R, stride_log_rho_s, i_r, slot, N, BLOCK, RIVALS, STEPS
        )
        count = tl.sum((m_n & (b_rank < total)).to(tl.int32), 0)
    p_count = scratch + 1
    tl.store(p_count + i_r, count)
    # the stores of all threads must precede the release by one thread
    tl.debug_barrier()
    arrived = tl.atomic_add(scratch, 1, sem="acq_rel", scope="gpu")
    if arrived == R - 1:
        tl.store(scratch, 0)
        o_r = tl.arange(0, REQS_PAD)
        m_r = o_r < R
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


@dataclass(slots=True)
class TakeBest(Op):
    """Lay out a step with the `total` best nodes of all requests.

    The host has fixed the step's size, so exactly min(total, sum of min(limit, N) over the active
    rows) nodes are taken, whatever their scores. Columns of score -inf count as nodes and come
    last. Ties go to the lower row.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or a negative total.
    """

    # By slot: path scores, non-increasing and not NaN.
    log_rho: Annotated[Tensor, "[S, N] float32"]
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1 for an inert row
    limits: Annotated[Tensor, "[S] int32"]  # most nodes of each slot; below 0 counts as 0
    rest: Annotated[Tensor, "[S] int32"]  # rows of each slot other than nodes, with its root
    total: int  # nodes of the step, at least 0
    logits_start: Annotated[Tensor, "[>= R + 1] int32"]  # written: running sum of root and nodes
    rows_start: Annotated[Tensor, "[>= R + 1] int32"]  # written: running sum of all rows
    scratch: Annotated[Tensor, "[>= R + 1] int32"]  # its first element is 0 before and after

    def check(self) -> None:
        Op.check(self)
        if self.total < 0:
            raise ValueError(f"{self.name}: total must be at least 0, got {self.total}")

    def triton(self) -> Launched | None:
        num_slots, limit = self.log_rho.shape
        block = padded(limit)
        # The constants depend on N and S, never on R.
        return self.launch(
            _take_kernel,
            self.slots.shape[0],
            BLOCK=block,
            # A thread runs at most 8 searches: more would run out of registers.
            RIVALS=min(max(2048 // block, 1), 16),
            STEPS=limit.bit_length(),
            REQS_PAD=padded(num_slots),
            num_warps=min(max(block // 16, 1), 8),
        )


take_best = public(TakeBest, cpu="bastion_kernels.cpu.draft")
