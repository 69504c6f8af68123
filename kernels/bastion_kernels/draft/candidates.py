# SPDX-License-Identifier: Apache-2.0
"""The drafter's per-position candidates `[R, D, M]` as ops read them; see `best_first`."""

from __future__ import annotations

from torch import Tensor

from bastion_kernels.op import Op


class ReadsCandidates(Op):
    """An op with `logprobs` `[R, D, P, M]`: P is 1, or M, a row for each candidate above."""

    __slots__ = ()
    logprobs: Tensor

    def check(self) -> None:
        self.check_declared()
        rows, width = self.logprobs.shape[2:]
        if rows not in (1, width):
            raise ValueError(f"{self.name}: P is 1 or M = {width}, got {rows}")

    @property
    def stateless(self) -> bool:
        """Whether all nodes of a depth off the n-gram draft share one row."""
        return self.logprobs.shape[2] == 1

    @property
    def stride_of_rows(self) -> int:
        """From the row of one candidate to that of the next."""
        return 0 if self.stateless else self.logprobs.stride(2)
