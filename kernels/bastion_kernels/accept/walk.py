# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk: a token was sampled at every node, follow it down the tree.

    node <- root
    repeat: emit sampled[node]; if a child of node carries that token, node <- child, else stop

Each node's token was drawn from the target's own distribution after the node's prefix, so what the
walk emits is what plain decoding would have emitted, whatever the tree: exact, at any temperature.

The kernel holds a request's parents and tokens in registers; a step down is one load (the token
drawn at the node) and one minimum over the columns (the first child that carries it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

# All of these may be slices that start at any row of a batch (chunked verification): a variant by
# alignment would be compiled while serving.
_SLICES = [
    "sampled_ptr",
    "fed_ptr",
    "slots_ptr",
    "starts_ptr",
    "out_path_ptr",
    "out_tokens_ptr",
    "num_sampled_ptr",
]


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _accept_kernel(
    sampled_ptr,
    fed_ptr,
    parents_ptr,
    slots_ptr,
    starts_ptr,
    out_path_ptr,
    out_tokens_ptr,
    num_sampled_ptr,
    parents_s,
    out_path_r,
    out_tokens_r,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH_PAD: tl.constexpr,
):
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    start = tl.load(starts_ptr + row).to(tl.int64)
    logits = tl.load(starts_ptr + row + 1) - start
    logits = tl.where(slot >= 0, logits, 0)
    column, step = tl.arange(0, BLOCK), tl.arange(0, LENGTH_PAD)
    in_tail = (column < N) & (column + 1 < logits)
    parent = tl.load(parents_ptr + slot * parents_s + column, mask=in_tail, other=-1)
    token = tl.load(fed_ptr + start + 1 + column, mask=in_tail, other=-1)

    path = tl.full([LENGTH_PAD], -1, tl.int32)
    emitted = tl.zeros([LENGTH_PAD], tl.int64)
    node = tl.where(logits > 0, 0, -1)
    count = tl.full([], 0, tl.int32)
    while (node >= 0) & (count < LENGTH):
        drawn = tl.load(sampled_ptr + start + node)
        path = tl.where(step == count, node, path)
        emitted = tl.where(step == count, drawn, emitted)
        count += 1
        child = tl.where(in_tail & (parent == node) & (token == drawn), column + 1, 0x7FFFFFFF)
        child = tl.min(child, 0)
        node = tl.where(child == 0x7FFFFFFF, -1, child)

    tl.store(out_path_ptr + row * out_path_r + step, path, mask=step < LENGTH)
    tl.store(out_tokens_ptr + row * out_tokens_r + step, emitted, mask=step < LENGTH)
    tl.store(num_sampled_ptr + row, count)


@dataclass(slots=True)
class AcceptPath(Op):
    """Write the accepted path of every request and the tokens it emits.

    The logits rows cu_num_logits[r] .. cu_num_logits[r+1] - 1 of request r are its root and nodes
    1, 2, ...; only those can be accepted. Siblings should carry distinct tokens; if they do not,
    the lower column is taken. An inert request (slot -1) or one without logits rows emits nothing:
    path -1, tokens 0, count 0.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    sampled: Tensor
    """`[L]` int64, token drawn at every logits row."""
    node_ids: Tensor
    """`[L]` int64, token that every logits row feeds."""
    parents: Tensor
    """`[S, N]` int32, node number of each column's parent; -1 unused."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request."""
    out_path: Tensor
    """`[R, D+1]` int32, node number at depth 0, 1, ..; -1 past the end, written."""
    out_tokens: Tensor
    """`[R, D+1]` int64, accepted tokens and the bonus token; 0 past the end, written."""
    num_sampled: Tensor
    """`[R]` int32, tokens emitted, written."""

    def check(self) -> None:
        reqs, longest = self.out_path.shape
        self.expect("sampled", (None,), torch.int64)
        self.expect("node_ids", (self.sampled.shape[0],), torch.int64)
        self.expect("parents", (None, None), torch.int32)
        self.expect("slots", (reqs,), torch.int64)
        self.expect("cu_num_logits", (reqs + 1,), torch.int32)
        self.expect("out_path", (reqs, longest), torch.int32)
        self.expect("out_tokens", (reqs, longest), torch.int64)
        self.expect("num_sampled", (reqs,), torch.int32)

    def reference(self) -> None:
        """The walk, request by request."""
        drawn, fed, starts = (
            self.sampled.tolist(),
            self.node_ids.tolist(),
            self.cu_num_logits.tolist(),
        )
        longest = self.out_path.shape[1]
        for r, slot in enumerate(self.slots.tolist()):
            start, rows = starts[r], starts[r + 1] - starts[r]
            path: list[int] = []
            if slot >= 0 and rows > 0:
                children: dict[tuple[int, int], int] = {}
                for column, parent in enumerate(self.parents[slot, : rows - 1].tolist()):
                    children.setdefault((parent, fed[start + column + 1]), column + 1)
                node: int | None = 0
                while node is not None and len(path) < longest:
                    path.append(node)
                    node = children.get((node, drawn[start + node]))
            padding = longest - len(path)
            self.out_path[r] = torch.tensor(path + [-1] * padding)
            self.out_tokens[r] = torch.tensor(
                [drawn[start + node] for node in path] + [0] * padding
            )
            self.num_sampled[r] = len(path)

    def triton(self) -> None:
        """One warp per request."""
        reqs, length = self.out_path.shape
        limit = self.parents.shape[1]
        if reqs == 0:
            return
        _accept_kernel[(reqs,)](
            self.sampled,
            self.node_ids,
            self.parents,
            self.slots,
            self.cu_num_logits,
            self.out_path,
            self.out_tokens,
            self.num_sampled,
            self.parents.stride(0),
            self.out_path.stride(0),
            self.out_tokens.stride(0),
            N=limit,
            LENGTH=length,
            BLOCK=max(32, triton.next_power_of_2(limit)),
            LENGTH_PAD=triton.next_power_of_2(length),
            num_warps=1,
        )


accept_path = public(AcceptPath, cpu="bastion_kernels.cpu.walk")
