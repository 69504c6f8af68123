# SPDX-License-Identifier: Apache-2.0
"""Model sizes of the cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Model:
    """Sizes of a target and its drafter, and of the batches to run."""

    name: str
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
    # trees of this many nodes, with these numbers of requests, over these contexts
    nodes: tuple[int, ...]
    reqs: tuple[int, ...]
    contexts: tuple[int, ...]
    # calls in a graph: for an op with hot data, and the minimum
    repeats: int = 1
    least_calls: int = 1
    # bytes that the calls of a graph touch if the data is to be cold, many times the L2 cache
    cold_bytes: int = 1


# Qwen3-8B and its DFlash drafter
QWEN3_8B = Model(
    "8B", 36, 32, 8, 128, 4096, 151936, 15, (16, 32), 16, torch.bfloat16,
    nodes=(64, 256), reqs=(1, 64), contexts=(1024, 8192, 32768), repeats=20, least_calls=6,
    cold_bytes=2**29,
)  # fmt: skip
# float16, because Triton's interpreter multiplies bfloat16 incorrectly
SMALL = Model(
    "small", 2, 4, 2, 16, 40, 257, 4, (4, 8), 8, torch.float16,
    nodes=(9,), reqs=(1, 3), contexts=(40,), least_calls=2,
)  # fmt: skip
