# SPDX-License-Identifier: Apache-2.0
"""Layout of keys and values in a block of a CPU's KV cache.

vLLM's C++ kernel packs the tokens of a block for the CPU's vector or matrix unit, differently for
every instruction set. The formats are not hard-coded here: vLLM's op writes numbered elements, and
the layout is derived from the result. Attention has fast paths for the formats that it recognises
and reads any other element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

OTHER, VECTOR, AMX = range(3)

# element size in bytes -> bits of a number that it can hold. Wider elements store them as raw bits;
# a float8 stores a small exact value, because vLLM's op rounds.
_DIGITS = {1: 3, 2: 15, 4: 15}
_INTEGERS = {2: torch.int16, 4: torch.int32}


def _rows(page: int, dim: int) -> Tensor:
    return torch.arange(page * 2 * dim, dtype=torch.int32).view(page, 2 * dim)


def _by_vectors(page: int, dim: int) -> Tensor:
    """Keys [dim, page], then values [page, dim]."""
    token, channel = torch.arange(page)[:, None], torch.arange(dim)
    keys, values = channel * page + token, page * dim + token * dim + channel
    return torch.cat([keys, values], 1).int()


def _by_tiles(page: int, dim: int) -> Tensor:
    """Keys of 16 tokens by pairs of channels; values of 16 channels by pairs of tokens."""
    token, channel = torch.arange(page)[:, None], torch.arange(dim)
    keys = token // 16 * 16 * dim + channel // 2 * 32 + token % 16 * 2 + channel % 2
    values = channel // 16 * 16 * page + token // 2 * 32 + channel % 16 * 2 + token % 2
    return torch.cat([keys, page * dim + values], 1).int()


@dataclass(frozen=True, eq=False)
class KVLayout:
    """How one head's part of a block is arranged.

    offsets: `[block_size, 2d]` int32, element offsets within the part of a token's key channels
    (first d columns) and value channels.
    """

    offsets: Tensor

    @cached_property
    def kind(self) -> int:
        """AMX or VECTOR, which have fast paths, or OTHER."""
        page, dim = self.offsets.shape[0], self.offsets.shape[1] // 2
        if page % 32 or dim % 32:
            return OTHER
        if torch.equal(self.offsets, _by_vectors(page, dim)):
            return VECTOR
        return AMX if torch.equal(self.offsets, _by_tiles(page, dim)) else OTHER

    @classmethod
    @lru_cache
    def rows(cls, page: int, dim: int, stride: int) -> KVLayout:
        """A token's key and value side by side, tokens `stride` elements apart."""
        return cls(torch.arange(page, dtype=torch.int32)[:, None] * stride + _rows(1, dim))


def learn_layout(
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None], page: int, dim: int, dtype: torch.dtype
) -> KVLayout:
    """The layout that an op writes to a cache.

    Args:
        write: called with key and value `[page, 1, d]`, a cache `[1, 1, page, 2d]` of zeros, and
            slots `[page]` int64.
        dtype: of keys, values and cache.

    Raises:
        ValueError: it does not store every element once and unchanged.
    """
    rows, bits = _rows(page, dim) + 1, _DIGITS[dtype.itemsize]
    kind = _INTEGERS.get(dtype.itemsize)
    found = torch.zeros(page * 2 * dim, dtype=torch.int64)
    # digit by digit, because a short element cannot hold every number
    for shift in range(0, int(rows.max()).bit_length(), bits):
        number = rows >> shift & 2**bits - 1
        digits = (number.to(dtype) if kind is None else number.to(kind).view(dtype))[:, None]
        cache = torch.zeros(1, 1, page, 2 * dim, dtype=dtype)
        write(digits[..., :dim], digits[..., dim:], cache, torch.arange(page))
        stored = cache.float() if kind is None else cache.view(kind)
        found |= stored.flatten().long() << shift
    offsets = torch.empty(page * 2 * dim, dtype=torch.int64)
    numbers = torch.arange(1, found.numel() + 1)
    if not torch.equal(found.sort().values, numbers):
        raise ValueError("the KV cache does not hold keys and values as they are")
    offsets[found - 1] = numbers - 1
    return KVLayout(offsets.view(page, 2 * dim).int())
