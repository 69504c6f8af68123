# SPDX-License-Identifier: Apache-2.0
"""Model sizes of the kernel benchmark's cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# the content of outputs before a run
POISON = -7777


@dataclass(frozen=True)
class Model:
    """Sizes of a target and its drafter, and of the batches to run."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    depth: int
    # candidates per depth (K)
    top_ks: tuple[int, ...]
    page: int
    dtype: torch.dtype
    # trees of this many nodes, with this many requests, over these contexts
    nodes: tuple[int, ...]
    many: int
    contexts: tuple[int, ...]
    # calls in a graph: for an op with hot data, and the minimum
    repeats: int
    least_calls: int
    # bytes that the calls of a graph touch if the data is to be cold, many times the L2 cache
    cold_bytes: int


# Qwen3-8B and its DFlash drafter
QWEN3_8B = Model(
    36, 32, 8, 128, 4096, 151936, 15, (16, 32), 16, torch.bfloat16,
    nodes=(64, 256), many=64, contexts=(1024, 8192, 32768), repeats=20, least_calls=6,
    cold_bytes=2**29,
)  # fmt: skip
# float16, because Triton's interpreter multiplies bfloat16 incorrectly
TINY = Model(
    2, 4, 2, 16, 40, 257, 4, (4, 8), 8, torch.float16,
    nodes=(9,), many=3, contexts=(40,), repeats=1, least_calls=2, cold_bytes=1,
)  # fmt: skip
