# SPDX-License-Identifier: Apache-2.0
"""The drafter's per-position candidates as ops read them; see `best_first`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bastion_kernels.op import Op


class ReadsCandidates(Op):
    """An op with these arguments: `[R, D, M]` and `[R, D, P, M]`."""

    __slots__ = ()
    candidates: Tensor
    logprobs: Tensor

    @property
    def stateless(self) -> bool:
        """Whether all nodes of a depth off the n-gram draft share one row."""
        return self.logprobs.shape[2] == 1

    def check_candidates(self) -> None:
        reqs, depth, width = self.candidates.shape
        self.expect("candidates", (reqs, depth, width), torch.int32, strided=True)
        self.expect("logprobs", (reqs, depth, None, width), torch.float32, strided=True)
        rows = self.logprobs.shape[2]
        if rows not in (1, width):
            raise ValueError(f"{self.name}: P is 1 or M = {width}, got {rows}")

    def candidate_arguments(self) -> dict[str, Any]:
        """The arguments of a kernel."""
        candidates, logprobs = self.candidates, self.logprobs
        return {
            "candidates": candidates,
            "logprobs": logprobs,
            "stride_candidates_r": candidates.stride(0),
            "stride_candidates_d": candidates.stride(1),
            "stride_candidates_m": candidates.stride(2),
            "stride_logprobs_r": logprobs.stride(0),
            "stride_logprobs_d": logprobs.stride(1),
            "stride_logprobs_p": 0 if self.stateless else logprobs.stride(2),
            "stride_logprobs_m": logprobs.stride(3),
            "D": candidates.shape[1],
            "M": candidates.shape[2],
        }
