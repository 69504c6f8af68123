# SPDX-License-Identifier: Apache-2.0
"""A step's requests as tensors, every version of tree attention on them, and dense attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from op_helpers import DEVICE
from torch import Tensor

from bastion_kernels.attention.kv_layout import KVLayout
from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import Tiles, TreeAttentionWorkspace
from tests import references
from tests.references.kv_layout import packed

POISON = -7777.0
PATHS = ["reference", "triton", *(["cpu"] if DEVICE.type == "cpu" else [])]
paths = pytest.mark.parametrize("path", PATHS)
SMALL = Tiles(block_m=16, block_n=16, num_warps=4, stages=2, occupancy=2)


def attend(
    query: Tensor, kv_cache: Tensor, *tables_scale_out: Any, version: str = "__call__",
    depths: Tensor | None = None, workspace: TreeAttentionWorkspace | None = None, **layer: Any,
) -> None:  # fmt: skip
    """One layer over one step. The arguments between are the step's tables, its scale and `out`."""
    *tables, scale, out = tables_scale_out
    planned = None if workspace is None else {workspace.window: workspace}
    step = AttentionStep(*tables, depths=depths, workspaces=planned)
    called = AttentionLayer(kv_cache, scale, **layer)
    if version == "reference":
        references.tree_attention(called, step, query, out)
    else:
        getattr(called, version)(step, query, out)


@dataclass
class Request:
    """Rows of one request in a step: `chunk` causal rows, then a tail given by its parents."""

    cached: int
    chunk: int = 0
    # parents of the tail's rows, root first (parent -1); [] = no tail
    parents: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.chunk + len(self.parents)

    def depth(self, node: int) -> int:
        """Of a row of the tail."""
        return 0 if node == 0 else 1 + self.depth(self.parents[node])

    def position(self, column: int) -> int:
        """Of a cached row, this step's included."""
        root = self.cached + self.chunk
        alone = column <= root or self.parents[column - root] < 0
        return column if alone else root + self.depth(column - root)

    def visible(self, row: int, window: int = 0) -> list[int]:
        """Cached rows that a row of this step sees, in order."""
        seen = self._causal(row)
        at = self.position(self.cached + row)
        return [c for c in seen if not window or at - self.position(c) < window]

    def _causal(self, row: int) -> list[int]:
        if row < self.chunk:
            return list(range(self.cached + row + 1))
        path, node = [], row - self.chunk
        while node >= 0:
            path.append(self.cached + self.chunk + node)
            node = self.parents[node]
        return list(range(self.cached + self.chunk)) + path[::-1]


def random_parents(n: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)]


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def star(n: int) -> list[int]:
    return [-1] + [0] * (n - 1)


class Batch:
    """Tensors of a step for a list of requests, with shuffled pages and shuffled slots."""

    def __init__(
        self, requests: list[Request], *, heads: tuple[int, int] = (4, 2), dim: int = 16,
        page: int = 8, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None,
        query_dtype: torch.dtype | None = None, seed: int = 0, padded_requests: int = 0,
        strided: bool = False, softcap: float = 0.0, window: int = 0, sinks: bool = False,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.requests, self.page, self.dim = requests, page, dim
        self.sizes: dict[str, Any] = {
            "heads": heads, "dim": dim, "page": page, "dtype": dtype, "kv_dtype": kv_dtype,
            "window": window,
        }  # fmt: skip
        num = len(requests) + padded_requests
        lengths = [r.cached + r.rows for r in requests] + [0] * padded_requests
        pages = [-(-n // page) for n in lengths]
        free = torch.randperm(sum(pages) + 5, generator=g).tolist()
        table = torch.full((num, max(pages) + 2), 2**30, dtype=torch.int32)
        for r, n in enumerate(pages):
            table[r, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int32)
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + request.rows)
        starts += [starts[-1]] * padded_requests
        self.rows = starts[len(requests)]

        nodes = max([len(r.parents) for r in requests] + [1])
        words = (nodes + 31) // 32
        slots = torch.randperm(num + 2, generator=g)[:num]
        bits = torch.full((num + 2, nodes, words), 0x55555555, dtype=torch.int32)
        depths = torch.full((num + 2, nodes - 1), 2**29, dtype=torch.int32)
        for r, request in enumerate(requests):
            for i in range(len(request.parents)):
                if i and request.parents[i] >= 0:
                    depths[slots[r], i - 1] = request.depth(i)
                mask, node = 0, i
                while node >= 0:
                    mask, node = mask | 1 << node, request.parents[node]
                for w in range(words):
                    word = mask >> 32 * w & 0xFFFFFFFF
                    bits[slots[r], i, w] = word - 2**32 if word >= 2**31 else word
        slots[len(requests) :] = -1

        # three rows more than the batch has
        rows, (hq, hkv) = starts[-1] + 3, heads
        self.softcap, self.window, self.depths = softcap, window, depths
        # of the cache that the CPU's version is given; None = rows
        self.layout: KVLayout | None = None
        self.sinks = 2 * torch.randn(hq, generator=g) if sinks else None
        shape = (sum(pages) + 5, hkv, page, 2 * dim)
        if strided:
            # pages x rows x heads in memory, heads apart
            kv = torch.randn(shape[0], page, hkv + 1, 2 * dim, generator=g)[:, :, :hkv]
            kv = kv.transpose(1, 2)
            fused = torch.randn(rows, hq + 3, dim, generator=g)
            query = fused.to(dtype)[:, 1 : hq + 1]
            out = torch.full((rows, dim, hq), POISON, dtype=dtype).transpose(1, 2)
        else:
            kv = torch.randn(shape, generator=g)
            query = torch.randn(rows, hq, dim, generator=g).to(dtype)
            out = torch.full_like(query, POISON)
        kv, query = kv.to(kv_dtype or dtype), query.to(query_dtype or dtype)
        # cached rows that belong to nobody must not matter
        used = torch.zeros(shape[0], page, dtype=torch.bool)
        for r, n in enumerate(lengths):
            for c in range(n):
                used[table[r, c // page], c % page] = True
        if kv.dtype.is_floating_point and kv.element_size() > 1:
            kv.transpose(1, 2)[~used] = float("nan")
        self.scale = dim**-0.5
        self.q_scale = torch.tensor([1.1]) if query_dtype else None
        self.k_scale = self.v_scale = None
        if kv_dtype is not None:
            self.k_scale, self.v_scale = torch.tensor([0.7]), torch.tensor([1.3])
        self.query, self.kv, self.out = query, kv, out
        self.table, self.bits, self.slots = table, bits, slots
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.tails = torch.tensor(
            [len(r.parents) for r in requests] + [0] * padded_requests, dtype=torch.int32
        )

    def parents(self) -> Tensor:
        """[slots, nodes] parents of the tails' nodes, as trees have them: -1 in unused columns."""
        shape = len(self.bits), max(1, self.bits.shape[1] - 1)
        parents = torch.full(shape, -1, dtype=torch.int32)
        for r, request in enumerate(self.requests):
            own = torch.tensor(request.parents[1:], dtype=torch.int32)
            parents[self.slots[r], : len(own)] = own
        return parents

    def path_alone(self, node: int) -> tuple[Tensor, Batch]:
        """The nodes of one tree's path to `node`, and that path as a sequence of its own."""
        (request,), page = self.requests, self.page
        columns = torch.tensor(request.visible(node))
        nodes = columns[request.cached :] - request.cached
        alone = Batch([Request(request.cached, chunk=len(nodes))], **self.sizes)
        alone.layout = self.layout
        alone.query[: len(nodes)] = self.query[nodes]
        rows = torch.arange(len(columns))
        source = self.kv[self.table[0, columns // page].long(), :, columns % page]
        alone.kv[alone.table[0, rows // page].long(), :, rows % page] = source
        return nodes, alone

    def args(self) -> tuple:
        self.out_on_device = self.out.to(DEVICE).clone(memory_format=torch.preserve_format)
        tensors = (
            self.query, self.kv, self.table, self.starts, self.lengths, self.tails, self.slots,
            self.bits,
        )  # fmt: skip
        return (*(t.to(DEVICE) for t in tensors), self.scale, self.out_on_device)

    def kinds(self) -> dict[str, Any]:
        """The keyword arguments of `attend`."""
        tensors = {
            "sinks": self.sinks, "depths": self.depths if self.window else None,
            "q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale,
        }  # fmt: skip
        placed = {name: None if t is None else t.to(DEVICE) for name, t in tensors.items()}
        return {"softcap": self.softcap, "window": self.window, **placed}

    def reference(self) -> Tensor:
        attend(*self.args(), **self.kinds(), version="reference")
        return self.out_on_device.cpu()

    def triton(self, tiles: Tiles = SMALL) -> Tensor:
        heads, kv_heads = self.query.shape[1], self.kv.shape[1]
        workspace = TreeAttentionWorkspace(
            heads, kv_heads, self.dim, self.out.dtype, self.query.shape[0],
            self.table.shape[0], DEVICE, tiles, window=self.window, max_tail=self.bits.shape[1],
        )  # fmt: skip
        args = self.args()
        workspace.plan(args[3], args[4])
        attend(*args, **self.kinds(), workspace=workspace, version="triton")
        assert int(workspace.arrived.abs().sum()) == 0
        return self.out_on_device.cpu()

    def cpu(self) -> Tensor:
        args, kinds = list(self.args()), self.kinds()
        if self.layout is not None:
            args[1] = packed(args[1].contiguous(), self.layout)
        assert kinds.pop("q_scale") is None
        attend(*args, **kinds, layout=self.layout, version="cpu")
        return self.out_on_device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """What the rows should be, computed in `dtype` with PyTorch."""
        out = torch.full(self.query.shape, POISON, dtype=dtype)
        hq, hkv = self.query.shape[1], self.kv.shape[1]
        head, cache = torch.arange(hq) // (hq // hkv), self.kv.float()
        for r, request in enumerate(self.requests):
            for i in range(request.rows):
                columns = torch.tensor(request.visible(i, self.window))
                pages = self.table[r][columns // self.page].long()
                # [L, Hq, 2d]
                kv = cache[pages, :, columns % self.page][:, head].to(dtype)
                keys, values = kv[..., : self.dim], kv[..., self.dim :]
                if self.k_scale is not None:
                    keys = (keys * self.k_scale).to(dtype)
                    values = (values * self.v_scale).to(dtype)
                row = int(self.starts[r]) + i
                query = self.query[row].float().to(dtype)
                if self.q_scale is not None:
                    query = (query * self.q_scale).to(dtype)
                scores = torch.einsum("hd,lhd->hl", query, keys) * self.scale
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[:, None].to(dtype)], 1)
                weights = scores.softmax(-1)[:, : len(columns)]
                out[row] = torch.einsum("hl,lhd->hd", weights, values)
        return out

    def check(self, got: Tensor) -> None:
        """Twice the error of PyTorch in the same dtype, and no row touched that is not ours."""
        truth = self.dense(torch.float64)[: self.rows]
        same = self.dense(self.out.dtype)[: self.rows]
        error = (got[: self.rows].double() - truth).abs().max().item()
        allowed = 2 * (same.double() - truth).abs().max().item() + 1e-5
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
        assert bool((got[self.rows :] == POISON).all())


def mixed(seed: int = 0) -> list[Request]:
    """A tree, a chain, plain decoding, a prefill chunk, a star, a chunk that ends in a tree."""
    g = torch.Generator().manual_seed(seed)
    return [
        Request(37, parents=random_parents(13, g)), Request(8, parents=chain(6)),
        Request(50, chunk=1), Request(0, chunk=21), Request(16, parents=star(9)),
        Request(5, chunk=4, parents=random_parents(7, g)), Request(3, parents=[-1]),
    ]  # fmt: skip
