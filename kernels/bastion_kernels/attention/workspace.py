# SPDX-License-Identifier: Apache-2.0
"""Buffers of the tree-attention kernel, allocated once. They also hold the plan of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bastion_kernels.attention.plan import BUNDLE_FIELDS, RUN_FIELDS, plan_kernel
from bastion_kernels.op import padded

# programs where the number of multiprocessors is unknown (the interpreter)
_DEFAULT_PROGRAMS = 4
# shared memory assumed there, in bytes per program: Hopper's
_DEFAULT_SHARED = 227 * 1024
# cost of starting and merging a second q-block, in tiles; 3 to 4 on an H100
_SECOND = 4
# most q-blocks that read the same tiles together. At eight, arithmetic already takes longer than
# loading the tile.
_MAX_WIDTH = 8
# Places for bundles in the smallest variant of the plan's kernel, which has 95 registers per thread
# on sm_90; with 2,048 places it has 255.
_FEWEST = 64


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the attention kernel."""

    # query rows times heads of a group in one matrix product, a power of two >= 16
    block_m: int
    # cached rows in a tile, a power of two >= 16
    block_n: int
    num_warps: int
    # pipeline stages; the number of tiles in shared memory, or one more where matrix instructions
    # read their inputs from registers
    stages: int
    # programs (CTAs) that share a multiprocessor
    occupancy: int


# Tiles of bf16 and fp16 kernels by padded head dimension (64: 64 or less), for GPUs with at least
# that many bytes of shared memory per program. The first match is used.
_TILES = (
    # H100, H200, B200
    (
        227 * 1024,
        {
            64: Tiles(64, 64, num_warps=4, stages=4, occupancy=2),
            128: Tiles(64, 64, num_warps=4, stages=3, occupancy=2),
            256: Tiles(64, 32, num_warps=8, stages=3, occupancy=1),
            # Gemma 4's global layers, which FlashAttention supports on these GPUs only. 64 rows
            # would spill, and their partial results would not fit.
            512: Tiles(32, 32, num_warps=8, stages=2, occupancy=1),
        },
    ),
    # A100
    (
        163 * 1024,
        {
            64: Tiles(64, 64, num_warps=4, stages=4, occupancy=2),
            128: Tiles(64, 64, num_warps=8, stages=4, occupancy=1),
            256: Tiles(64, 32, num_warps=8, stages=3, occupancy=1),
        },
    ),
    # RTX 30, 40 and 50, A6000, L40S, RTX PRO 6000
    (
        99 * 1024,
        {
            64: Tiles(64, 64, num_warps=4, stages=3, occupancy=2),
            128: Tiles(64, 64, num_warps=8, stages=3, occupancy=1),
            256: Tiles(32, 32, num_warps=8, stages=3, occupancy=1),
        },
    ),
)


def default_tiles(
    dtype: torch.dtype, block_d: int, group: int, shared: int = _DEFAULT_SHARED
) -> Tiles:
    """Tile sizes for a data type, padded head dimension and number of heads per key head.

    On Hopper two programs of one warpgroup (64 rows) share a multiprocessor, so the softmax of one
    overlaps the products of the other: two warpgroups in one program are 1.1 to 1.3 times slower on
    an H100 (head dimension 128, trees of 64 nodes). fp32 products are exact (no TF32).

    Args:
        shared: shared memory per program, in bytes.

    Raises:
        ValueError: too little shared memory, too large a head, or too many heads share a key head.
    """
    if dtype == torch.float32:
        tiles = Tiles(16 if block_d > 64 else 32, 16, num_warps=4, stages=1, occupancy=2)
    else:
        fitting = [tiles for least, tiles in _TILES if least <= shared]
        if not fitting or max(64, block_d) not in fitting[0]:
            raise ValueError(
                f"tree_attention: no tiles for a padded head dimension of {block_d} and {shared} "
                f"bytes of shared memory; at least {_TILES[-1][0]} are needed for one up to 256, "
                f"and {_TILES[0][0]} for 512"
            )
        tiles = fitting[0][max(64, block_d)]
    block_m = padded(group, tiles.block_m)
    # the merge holds two fp32 partial results in shared memory
    if group > 64 or 2 * 4 * block_m * block_d > shared:
        most = 64 if group > 64 else block_m // 2
        raise ValueError(
            f"tree_attention: {group} query heads share a key head, at most {most} may "
            f"with {shared} bytes of shared memory"
        )
    return replace(tiles, block_m=block_m)


class TreeAttentionWorkspace:
    """Buffers for batches of up to `max_rows` rows in up to `max_requests` requests.

    Call `plan` once per step, before that step's attention. It reads device buffers only, so it may
    be captured in a graph. Layers with the same heads share a workspace; only one stream may use it
    at a time.

    Args:
        num_heads, num_kv_heads, head_dim: of the attention layers.
        dtype: of the queries.
        max_rows: largest number of query rows of a step, padding included.
        max_requests: largest number of requests of a step, padding included.
        tiles: tile sizes, for tuning and tests.
        window: of the layers, in positions; 0 = none.
        max_tail: most rows of a tail, root included; read where there is a window.
        processors: number of multiprocessors, for a GPU that is absent; None = `device`'s.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_rows: int,
        max_requests: int,
        device: torch.device | str,
        tiles: Tiles | None = None,
        *,
        window: int = 0,
        max_tail: int = 1,
        processors: int | None = None,
    ) -> None:
        device = torch.device(device)
        if num_heads % num_kv_heads:
            raise ValueError(f"tree_attention: {num_heads} heads over {num_kv_heads} key heads")
        self.kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.head_dim, self.block_d = head_dim, padded(head_dim, 16)
        self.dtype, self.max_rows, self.max_requests = dtype, max_rows, max_requests
        self.window, self.max_tail = window, max_tail if window else 1
        shared = _DEFAULT_SHARED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            processors = properties.multi_processor_count
            # PyTorch has this for NVIDIA's GPUs only
            shared = getattr(
                properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
            )
        self.tiles = tiles or default_tiles(dtype, self.block_d, self.group, shared)
        self.block_q = self.tiles.block_m // self.group
        self.programs = processors * self.tiles.occupancy if processors else _DEFAULT_PROGRAMS
        # one step may need a team of every width
        self.width = max(w for w in range(1, _MAX_WIDTH + 1) if w * (w + 1) // 2 <= self.programs)
        bundles = max_rows // (self.block_q * self.width) + max_requests
        self.capacity = padded(bundles)
        # smaller variants of the plan, for steps with few requests
        self.capacities = [self.capacity]
        while self.capacities[0] > _FEWEST:
            self.capacities.insert(0, self.capacities[0] // 2)

        self.header = torch.zeros(2, dtype=torch.int32, device=device)
        self.bundles = torch.zeros(self.capacity, BUNDLE_FIELDS, dtype=torch.int32, device=device)
        self.runs = torch.zeros(self.programs, RUN_FIELDS, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(self.programs, dtype=torch.int32, device=device)
        # a run cuts at most two q-blocks: its first and its last
        cut, rows = (self.programs, 2), self.tiles.block_m
        self.partial = torch.empty(*cut, rows, self.block_d, dtype=torch.float32, device=device)
        self.partial_stats = torch.empty(*cut, 2, rows, dtype=torch.float32, device=device)

    def warm_up(self) -> None:
        """Compile every variant of the plan, so that no step has to wait for the compiler."""
        none = torch.zeros(2, dtype=torch.int32, device=self.header.device)
        for capacity in self.capacities:
            self._plan(none, none[:1], capacity)

    def plan(self, query_start_loc: Tensor, seq_lens: Tensor, rows: int | None = None) -> None:
        """Divide a step's work.

        Args:
            query_start_loc: `[R+1]` int32.
            seq_lens: `[R]` int32, cached rows of each request, this step's included.
            rows: upper bound of the step's rows; None = `max_rows`.

        Raises:
            ValueError: more requests than the workspace was made for.
        """
        num_reqs = seq_lens.shape[0]
        if num_reqs > self.max_requests:
            raise ValueError(f"tree_attention: {num_reqs} requests, room for {self.max_requests}")
        rows = self.max_rows if rows is None else min(rows, self.max_rows)
        bundles = rows // (self.block_q * self.width) + num_reqs
        capacity = next(size for size in self.capacities if size >= bundles)
        self._plan(query_start_loc, seq_lens, capacity)

    def _plan(self, query_start_loc: Tensor, seq_lens: Tensor, capacity: int) -> None:
        num_reqs = seq_lens.shape[0]
        plan_kernel[(1,)](
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            header=self.header,
            bundles=self.bundles,
            runs=self.runs,
            num_reqs=num_reqs,
            programs=self.programs,
            KV_HEADS=self.kv_heads,
            BLOCK_Q=self.block_q,
            BLOCK_N=self.tiles.block_n,
            WIDTH=self.width,
            WINDOW=self.window,
            MAX_TAIL=self.max_tail,
            CLASSES=padded(self.width),
            CAPACITY=capacity,
            PROGRAMS=padded(self.programs),
            BUNDLE_FIELDS=BUNDLE_FIELDS,
            RUN_FIELDS=RUN_FIELDS,
            SEARCH_STEPS=capacity.bit_length() + 1,
            SECOND=_SECOND,
            num_warps=8 if capacity >= 512 else 4,
        )
