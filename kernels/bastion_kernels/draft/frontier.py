# SPDX-License-Identifier: Apache-2.0
"""One depth of a lattice of prefixes: score its candidates and keep the B best new prefixes.

Those are the frontier of the depth; see `prefix_lattice`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_kernels.checks import FLOATS
from bastion_kernels.draft.frontier_kernel import extend_kernel
from bastion_kernels.op import Op, public

_MOST_SCORES = 8192  # prefixes times candidates, in the registers of one program


def _power(number: int) -> int:
    """The next power of two, without Triton."""
    return 1 << (number - 1).bit_length()


@dataclass(slots=True)
class ExtendFrontier(Op):
    """Score the candidates of a depth after each prefix, and keep the B best new prefixes.

    The score of a candidate is its base score plus its row of the last projection times
    `silu(position + latent)` of the prefix; the softmax over the M candidates gives log q. A path's
    cost is -log rho, summed in fp32 from the root down as in `best_first`. New prefixes are ordered
    by parent and candidate; ties in cost go to the first in that order. Unused places get parent 0,
    child 0 and cost +inf.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or too many prefixes,
            candidates or scores for the kernel (255, 255 and 8192).
    """

    base: Tensor
    """`[R, M]` fp32, rows at any stride, scores without the head's correction."""
    position: Tensor
    """`[R, E]`, rows at any stride, the depth's own term, added to every prefix's `latent`."""
    latent: Tensor
    """`[R, P, E]`, the first projection of each prefix's state; a slice of longer rows."""
    weight: Tensor
    """`[R, M, E]`, requests at any stride, rows of the last projection."""
    costs: Tensor
    """`[R, P]` fp32, -log rho of each prefix; +inf for an unused place."""
    top_k: int
    """Most children of a prefix."""
    corrected: bool
    """Whether the head corrects this depth; otherwise the score is `base`."""
    logprobs: Tensor
    """`[R, P, M]` fp32, requests at any stride, log q, written."""
    rows: Tensor
    """`[R, P, M]` int32, requests at any stride, each child's index among the new prefixes, or -1;
    written."""
    parents: Tensor
    """`[R, B]` int32, the prefix that each new prefix extends, written."""
    children: Tensor
    """`[R, B]` int32, its candidate, written."""
    out_costs: Tensor
    """`[R, B]` fp32, -log rho of each new prefix, written."""

    def check(self) -> None:
        reqs, prefixes, candidates = self.logprobs.shape
        width, kept = self.latent.shape[2], self.parents.shape[1]
        self.expect("base", (reqs, candidates), torch.float32)
        self.expect("position", (reqs, width), *FLOATS)
        self.expect("latent", (reqs, prefixes, width), self.position.dtype)
        self.expect("weight", (reqs, candidates, width), self.position.dtype)
        self.expect("costs", (reqs, prefixes), torch.float32)
        for name in ("costs", "parents", "children", "out_costs"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{self.name}: {name} must be contiguous")
        self.expect("logprobs", (reqs, prefixes, candidates), torch.float32)
        self.expect("rows", (reqs, prefixes, candidates), torch.int32)
        self.expect("parents", (reqs, kept), torch.int32)
        self.expect("children", (reqs, kept), torch.int32)
        self.expect("out_costs", (reqs, kept), torch.float32)
        for name in ("weight", "logprobs", "rows"):
            tensor: Tensor = getattr(self, name)
            if tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]:
                raise ValueError(f"{self.name}: a request's {name} must be contiguous")
        most = max(prefixes, kept, candidates)
        padded = _power(prefixes) * _power(candidates)
        if most > 255 or padded > _MOST_SCORES or self.top_k < 1:
            raise ValueError(
                f"{self.name}: P, B and M <= 255, P * M <= {_MOST_SCORES}, top_k >= 1, got "
                f"{prefixes}, {kept}, {candidates}, {self.top_k}"
            )

    def score(self) -> None:
        """Write log q of every candidate after every prefix."""
        scores = self.base[:, None]
        if self.corrected:
            latent = F.silu(self.position[:, None].float() + self.latent.float())
            latent = latent.to(self.weight.dtype).float()
            scores = scores + latent @ self.weight.float().mT
        self.logprobs.copy_(scores.log_softmax(-1).expand_as(self.logprobs))

    def reference(self) -> None:
        """Stable sorts."""
        self.score()
        reqs, _, candidates = self.logprobs.shape
        own = (-self.logprobs).clamp(min=0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        places = own.sort(dim=-1, stable=True).indices.argsort(dim=-1)
        costs = self.costs[..., None] + own.masked_fill(places >= self.top_k, torch.inf)
        kept = self.parents.shape[1]
        self.rows.fill_(-1)
        self.parents.zero_()
        self.children.zero_()
        self.out_costs.fill_(torch.inf)
        order = torch.arange(kept, dtype=torch.int32, device=self.rows.device)
        for req in range(reqs):
            best = costs[req].flatten().sort(stable=True)
            number = int(best.values[:kept].isfinite().sum())
            chosen = best.indices[:number].sort().values
            self.rows[req].view(-1)[chosen] = order[:number]
            self.parents[req, :number] = (chosen // candidates).int()
            self.children[req, :number] = (chosen % candidates).int()
            self.out_costs[req, :number] = costs[req].flatten()[chosen]

    def triton(self) -> None:
        reqs, prefixes, candidates = self.logprobs.shape
        if reqs == 0:
            return
        width, kept = self.latent.shape[2], self.parents.shape[1]
        extend_kernel[(reqs,)](
            base=self.base,
            position=self.position,
            latent=self.latent,
            weight=self.weight,
            costs=self.costs,
            logprobs=self.logprobs,
            rows=self.rows,
            parents=self.parents,
            children=self.children,
            out_costs=self.out_costs,
            stride_base_r=self.base.stride(0),
            stride_position_r=self.position.stride(0),
            stride_latent_r=self.latent.stride(0),
            stride_latent_p=self.latent.stride(1),
            stride_weight_r=self.weight.stride(0),
            stride_logprobs_r=self.logprobs.stride(0),
            stride_rows_r=self.rows.stride(0),
            P=prefixes,
            M=candidates,
            E=width,
            B=kept,
            TOP_K=self.top_k,
            CORRECTED=self.corrected,
            BLOCK_P=max(16, _power(prefixes)),
            BLOCK_M=max(16, _power(candidates)),
            BLOCK_E=32,
            BLOCK_B=_power(kept),
        )


extend_frontier = public(ExtendFrontier, device_of="costs")
