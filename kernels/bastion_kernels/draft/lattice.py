# SPDX-License-Identifier: Apache-2.0
"""The drafter's lattice as ops read it; the kinds of lattices are in `best_first`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bastion_kernels.op import Op


class ReadsLattice(Op):
    """An op with these arguments: `[R, D, M]`, `[R, D, P, M]` and `[R, D, P, M]`, or None."""

    __slots__ = ()
    candidates: Tensor
    logprobs: Tensor
    rows: Tensor | None

    @property
    def stateless(self) -> bool:
        """Whether all nodes of a depth off the copy share one row."""
        return self.rows is None and self.logprobs.shape[2] == 1

    def check_lattice(self) -> None:
        reqs, depth, width = self.candidates.shape
        self.expect("candidates", (reqs, depth, width), torch.int32, strided=True)
        self.expect("logprobs", (reqs, depth, None, width), torch.float32, strided=True)
        if self.rows is not None:
            self.expect("rows", tuple(self.logprobs.shape), torch.int32, strided=True)

    def lattice(self) -> dict[str, Any]:
        """The arguments of a kernel."""
        candidates, logprobs, rows = self.candidates, self.logprobs, self.rows
        strides = (0, 0, 0, 0) if rows is None else rows.stride()
        return {
            "candidates": candidates,
            "logprobs": logprobs,
            "rows": candidates if rows is None else rows,
            "stride_candidates_r": candidates.stride(0),
            "stride_candidates_d": candidates.stride(1),
            "stride_candidates_m": candidates.stride(2),
            "stride_logprobs_r": logprobs.stride(0),
            "stride_logprobs_d": logprobs.stride(1),
            "stride_logprobs_p": 0 if self.stateless else logprobs.stride(2),
            "stride_logprobs_m": logprobs.stride(3),
            "stride_rows_r": strides[0],
            "stride_rows_d": strides[1],
            "stride_rows_p": strides[2],
            "stride_rows_m": strides[3],
            "D": candidates.shape[1],
            "M": candidates.shape[2],
            "HAS_ROWS": rows is not None,
        }
