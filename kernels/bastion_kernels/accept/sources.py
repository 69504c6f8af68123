# SPDX-License-Identifier: Apache-2.0
"""Count verified nodes and accepted tokens by their source: the drafter, a copy, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton


@triton.jit(do_not_specialize_on_alignment=["slots", "cu_num_logits", "path", "counts"])
def _sources_kernel(
    sources,
    slots,
    cu_num_logits,
    path,
    counts,
    stride_sources_s,
    stride_path_r,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH_PAD: tl.constexpr,
):
    """Grid: (R,)."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        nodes = tl.load(cu_num_logits + i_r + 1) - tl.load(cu_num_logits + i_r) - 1
        sources += slot * stride_sources_s
        o_n = tl.arange(0, BLOCK)
        b_source = tl.load(sources + o_n, mask=o_n < tl.minimum(nodes, N), other=0)
        o_d = tl.arange(0, LENGTH_PAD)
        b_node = tl.load(path + i_r * stride_path_r + o_d, mask=o_d < LENGTH, other=-1)
        b_taken = tl.load(sources + b_node - 1, mask=(b_node > 0) & (b_node <= nodes), other=0)
        for kind in tl.static_range(1, 4):
            verified = tl.sum((b_source == kind).to(tl.int32), 0)
            accepted = tl.sum((b_taken == kind).to(tl.int32), 0)
            tl.atomic_add(counts + kind - 1, verified, mask=verified > 0)
            tl.atomic_add(counts + 2 + kind, accepted, mask=accepted > 0)


@dataclass(slots=True)
class CountSources(Op):
    """Add a step's verified nodes and accepted tokens to the counts of their sources."""

    # Of `expand_best_first`: 1 the drafter, 2 a copy, 3 both, 0 unused.
    sources: Annotated[Tensor, "[S, N] int32"]
    slots: Annotated[Tensor, "[R] int64 or int32"]  # request slot of each row, or -1
    # First logits row of each request: its root, then its nodes.
    cu_num_logits: Annotated[Tensor, "[>= R + 1] int32"]
    # Accepted node numbers from the root (0) down; then -1.
    path: Annotated[Tensor, "[R, LENGTH] int32"]
    # Added to: nodes, then accepted tokens, of the drafter, a copy, both.
    counts: Annotated[Tensor, "[2, 3] int32"]

    def triton(self) -> None:
        self.launch(
            _sources_kernel,
            self.slots.shape[0],
            BLOCK=triton.next_power_of_2(self.sources.shape[1]),
            LENGTH_PAD=triton.next_power_of_2(self.path.shape[1]),
            num_warps=1,
        )


count_sources = public(CountSources, cpu="bastion_kernels.cpu.ngram")
