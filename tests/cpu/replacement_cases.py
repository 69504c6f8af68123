# SPDX-License-Identifier: Apache-2.0
"""Random and hostile arguments for every Triton kernel that has a CPU replacement.

A case makes the arguments of one launch from a seed. The same seed makes the same arguments again,
so that kernel and replacement each get their own copy. Hostile arguments have what the kernels must
tolerate: request slots of -1, requests without tokens, padding rows, placeholders of -1, and gaps
between rows. Of the parameters that a case does not give, `x_stride` is the stride of the rows of
`x_ptr`, and others are as `USUAL` has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

SLOTS, REQS, VOCAB, STEPS = 9, 5, 700, 4


class Launch:
    """A kernel's grid and arguments, and the tensors that it gets as addresses."""

    def __init__(self, grid: tuple[int, ...], *behind: torch.Tensor, **args: Any) -> None:
        self.grid, self.behind, self.args = grid, behind, args

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that the kernel may write to, gaps between rows included."""
        named = {f"behind {i}": tensor for i, tensor in enumerate(self.behind)} | self.args
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                size = value.untyped_storage().nbytes() // value.element_size()
                yield name, value.as_strided((size,), (1,), 0)


class Draw:
    """Random tensors from a seed."""

    def __init__(self, seed: int, hostile: bool) -> None:
        self.hostile = hostile
        self._rng = np.random.default_rng(seed)

    def ints(self, low: int, high: int, *shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        """Whole numbers of [low, high)."""
        return torch.from_numpy(self._rng.integers(low, high, shape)).to(dtype)

    def longs(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return self.ints(low, high, *shape, dtype=torch.int64)

    def floats(self, *shape: int) -> torch.Tensor:
        """Normal numbers, fp32."""
        return torch.from_numpy(self._rng.normal(size=shape).astype(np.float32))

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same rows; if hostile, with a gap after each."""
        if not self.hostile:
            return tensor
        wide = torch.cat([tensor, tensor[:, :3]], dim=1)
        return wide[:, : tensor.shape[1]]

    def slots(self, negative: bool = False) -> torch.Tensor:
        """[R] distinct request slots; if `negative` and hostile, one of them is -1."""
        slots = torch.from_numpy(self._rng.permutation(SLOTS)[:REQS].astype(np.int32))
        if negative and self.hostile:
            slots[2] = -1
        return slots

    def starts(self, longest: int, shortest: int = 0) -> torch.Tensor:
        """[R + 1] first rows of requests with 1 (hostile: `shortest`) to `longest` rows."""
        low = shortest if self.hostile else max(shortest, 1)
        lengths = self._rng.integers(low, longest + 1, REQS)
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

    def logits(self, rows: int) -> torch.Tensor:
        """[rows, V] fp32; hostile: ties, -inf, gaps."""
        logits = self.floats(rows, VOCAB)
        if self.hostile:
            logits = (logits * 2).round()
            logits[logits < -2] = -torch.inf
        return self.rows(logits)

    def temperatures(self) -> torch.Tensor:
        """[S] temperatures, some 0 and some 1."""
        choice = torch.tensor([0.0, 1.0, 0.7, 1.9])
        return choice[self.longs(0, 4, SLOTS)]

    def seeds(self) -> torch.Tensor:
        return self.longs(-(2**62), 2**62, SLOTS)


USUAL: dict[str, Callable[[Draw], Any]] = {
    "vocab_size": lambda draw: VOCAB, "BLOCK_SIZE": lambda draw: 256, "num_reqs": lambda draw: REQS,
    "temperature_ptr": Draw.temperatures, "temp_ptr": Draw.temperatures, "seeds_ptr": Draw.seeds,
    "idx_mapping_ptr": Draw.slots,
}  # fmt: skip


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of tensors, as vLLM's block tables store them."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def expanded(starts: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The request slot of every row, and its position within the request."""
    counts = starts.diff().to(torch.int64)
    positions = [torch.arange(int(n), dtype=torch.int32) for n in counts]
    return slots.repeat_interleave(counts), torch.cat(positions)


# `package.module:kernel` or `package.module:kernel/variant` -> its case
CASES: dict[str, Callable[[Draw], Launch]] = {}
_Case = TypeVar("_Case", bound=Callable[..., Launch])


def case(target: str, **variant: Any) -> Callable[[_Case], _Case]:
    """Register a case: a function of a `Draw`, and of what makes this a variant."""

    def register(function: _Case) -> _Case:
        CASES[target] = functools.partial(function, **variant)
        return function

    return register
