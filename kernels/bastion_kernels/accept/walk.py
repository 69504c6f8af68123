# SPDX-License-Identifier: Apache-2.0
"""Verification of a path: follow the tokens sampled at the nodes down the tree.

    node <- root
    repeat: emit sampled[node]; if a child of node has that token, node <- child, else stop

Each token is drawn from the target's distribution given the node's prefix. The emitted tokens are
therefore those of plain decoding, for any tree and temperature. Nodes and accepted tokens can be
counted by their source on the way: the drafter, an n-gram draft, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.bound import Launched
from bastion_kernels.op import Op, padded, public
from bastion_kernels.triton_or_none import tl, triton

# With chunked verification these are slices that start at any row of a batch; variants by alignment
# would be compiled while serving.
_SLICES = [
    "sampled",
    "node_ids",
    "slots",
    "cu_num_logits",
    "out_path",
    "out_tokens",
    "num_sampled",
    "num_rejected",
    "counts",
]


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _accept_kernel(
    sampled,
    node_ids,
    parents,
    slots,
    cu_num_logits,
    out_path,
    out_tokens,
    num_sampled,
    num_rejected,
    sources,
    counts,
    stride_parents_s,
    stride_sources_s,
    stride_out_path_r,
    stride_out_tokens_r,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH_PAD: tl.constexpr,
):
    """Grid: (R,)."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r)
    start = tl.load(cu_num_logits + i_r).to(tl.int64)
    rows = tl.load(cu_num_logits + i_r + 1) - start
    rows = tl.where(slot >= 0, rows, 0)
    o_n, o_d = tl.arange(0, BLOCK), tl.arange(0, LENGTH_PAD)
    m_tail = (o_n < N) & (o_n + 1 < rows)
    b_parent = tl.load(parents + slot * stride_parents_s + o_n, mask=m_tail, other=-1)
    b_token = tl.load(node_ids + start + 1 + o_n, mask=m_tail, other=-1)

    b_path = tl.full([LENGTH_PAD], -1, tl.int32)
    b_emitted = tl.zeros([LENGTH_PAD], tl.int64)
    node = tl.where(rows > 0, 0, -1)
    count = tl.full([], 0, tl.int32)
    while (node >= 0) & (count < LENGTH):
        drawn = tl.load(sampled + start + node)
        b_path = tl.where(o_d == count, node, b_path)
        b_emitted = tl.where(o_d == count, drawn, b_emitted)
        count += 1
        child = tl.where(m_tail & (b_parent == node) & (b_token == drawn), o_n + 1, 0x7FFFFFFF)
        child = tl.min(child, 0)
        node = tl.where(child == 0x7FFFFFFF, -1, child)

    tl.store(out_path + i_r * stride_out_path_r + o_d, b_path, mask=o_d < LENGTH)
    tl.store(out_tokens + i_r * stride_out_tokens_r + o_d, b_emitted, mask=o_d < LENGTH)
    tl.store(num_sampled + i_r, count)
    if num_rejected is not None:
        tl.store(num_rejected + i_r, tl.load(cu_num_logits + i_r + 1) - start - count)
    if counts is not None:
        sources += slot * stride_sources_s
        b_source = tl.load(sources + o_n, mask=m_tail, other=0)
        b_taken = tl.load(sources + b_path - 1, mask=b_path > 0, other=0)
        for kind in tl.static_range(1, 4):
            tl.store(counts + i_r * 6 + kind - 1, tl.sum((b_source == kind).to(tl.int32), 0))
            tl.store(counts + i_r * 6 + kind + 2, tl.sum((b_taken == kind).to(tl.int32), 0))


@dataclass(slots=True)
class AcceptPath(Op):
    """Write the accepted path of every request and the tokens it emits.

    The logits rows cu_num_logits[r] .. cu_num_logits[r+1] - 1 of request r are its root and nodes
    1, 2, ...; only those can be accepted. Siblings should have distinct tokens; of equal ones the
    lower column is taken. An inert request (slot -1) or one without logits rows emits nothing: path
    -1, tokens 0, count 0.
    """

    sampled: Annotated[Tensor, "[P] int64"]  # token drawn at every logits row
    node_ids: Annotated[Tensor, "[P] int32 or int64"]  # input token of every logits row
    parents: Annotated[Tensor, "[S, N] int32"]  # node number of each column's parent; -1 unused
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1
    cu_num_logits: Annotated[Tensor, "[R + 1] int32"]  # first logits row of each request
    # Written: node number at depth 0, 1, ..; -1 past the end.
    out_path: Annotated[Tensor, "[R, LENGTH] int32"]
    # Written: accepted tokens and the bonus token; 0 past the end.
    out_tokens: Annotated[Tensor, "[R, LENGTH] int64"]
    num_sampled: Annotated[Tensor, "[R] int32"]  # written: tokens emitted
    # Written: logits rows that emitted nothing.
    num_rejected: Annotated[Tensor | None, "[R] int32"] = None
    # Of `expand_best_first`: 1 the drafter, 2 an n-gram draft, 3 both, 0 unused.
    sources: Annotated[Tensor | None, "[S, N] int32"] = None
    # Written: verified nodes, then accepted tokens, by source.
    counts: Annotated[Tensor | None, "[R, 2, 3] int32"] = None

    def triton(self) -> Launched | None:
        reqs, length = self.out_path.shape
        return self.launch(
            _accept_kernel,
            reqs,
            BLOCK=padded(self.parents.shape[1], 32),
            LENGTH_PAD=padded(length),
            num_warps=1,
        )


accept_path = public(AcceptPath, cpu="bastion_kernels.cpu.walk")
