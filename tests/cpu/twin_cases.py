# SPDX-License-Identifier: Apache-2.0
"""Random and hostile arguments for every Triton kernel that has a native twin.

A case makes the arguments of one launch from a seed: the same again for the same seed, so that
kernel and twin each get their own. Hostile ones have what the kernels promise to stand: slots of
-1, requests without tokens, padding rows, placeholders of -1, rows with gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

SLOTS, REQS, VOCAB, STEPS = 9, 5, 700, 4


@dataclass
class Launch:
    """A kernel's grid and arguments, and the tensors it reaches by address."""

    grid: tuple[int, ...]
    args: dict[str, Any]
    behind: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that may have been written to, gaps between rows included."""
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

    def floats(self, *shape: int) -> torch.Tensor:
        """Normal numbers, fp32."""
        return torch.from_numpy(self._rng.normal(size=shape).astype(np.float32))

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same rows with a gap after each, if hostile."""
        if not self.hostile:
            return tensor
        wide = torch.cat([tensor, tensor[:, :3]], dim=1)
        return wide[:, : tensor.shape[1]]

    def slots(self, negative: bool = False) -> torch.Tensor:
        """[R] distinct slots, with one of -1 where a kernel stands it."""
        slots = torch.from_numpy(self._rng.permutation(SLOTS)[:REQS].astype(np.int32))
        if negative and self.hostile:
            slots[2] = -1
        return slots

    def starts(self, longest: int, shortest: int = 0) -> torch.Tensor:
        """[R + 1] where requests of `shortest` (hostile) or 1 to `longest` rows begin."""
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
        """[S], some 0 and some 1."""
        choice = torch.tensor([0.0, 1.0, 0.7, 1.9])
        return choice[self.ints(0, 4, SLOTS, dtype=torch.int64)]

    def seeds(self) -> torch.Tensor:
        """[S] int64."""
        return self.ints(-(2**62), 2**62, SLOTS, dtype=torch.int64)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As vLLM's block tables keep them."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def expanded(starts: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot and place within its request of every row."""
    counts = starts.diff().to(torch.int64)
    places = [torch.arange(int(n), dtype=torch.int32) for n in counts]
    return slots.repeat_interleave(counts), torch.cat(places)


CASES: dict[str, Callable[[Draw], Launch]] = {}
"""`package.module:kernel` or `package.module:kernel/variant` -> its case"""


def case(target: str) -> Callable[[Callable[[Draw], Launch]], Callable[[Draw], Launch]]:
    """Register a case."""

    def register(function: Callable[[Draw], Launch]) -> Callable[[Draw], Launch]:
        CASES[target] = function
        return function

    return register
