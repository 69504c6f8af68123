# SPDX-License-Identifier: Apache-2.0
"""Tree attention against dense masked attention, row by row, over explicitly gathered columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

import bastion_kernels.attention.workspace as workspace_module
from bastion_kernels.attention.cpu import SHIFTS, tree_attention_cpu
from bastion_kernels.attention.tree_attention import (
    TreeAttentionWorkspace,
    tree_attention,
    tree_attention_reference,
    tree_attention_triton,
    write_kv,
)
from bastion_kernels.attention.workspace import Tiles, default_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -7777.0
paths = pytest.mark.parametrize(
    "path", ["reference", "triton", *(["cpu"] if DEVICE == "cpu" else [])]
)
SMALL = Tiles(block_m=16, block_n=16, num_warps=4, stages=2, occupancy=2)


@pytest.fixture(autouse=True)
def bfloat16_products_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as uint16 and would multiply the bit patterns."""

    def widen(x: TensorHandle) -> TensorHandle:
        if x.dtype != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    original = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: original(self, widen(a), widen(b), *rest),
    )


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

    def visible(self, row: int) -> list[int]:
        """Cached rows that a row of this step sees, in order."""
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
        self,
        requests: list[Request],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
        page: int = 8,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
        spare_rows: int = 3,
        padded_requests: int = 0,
        strided: bool = False,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.requests, self.page, self.dim = requests, page, dim
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
        for r, request in enumerate(requests):
            for i in range(len(request.parents)):
                mask, node = 0, i
                while node >= 0:
                    mask, node = mask | 1 << node, request.parents[node]
                for w in range(words):
                    word = mask >> 32 * w & 0xFFFFFFFF
                    bits[slots[r], i, w] = word - 2**32 if word >= 2**31 else word
        slots[len(requests) :] = -1

        hq, hkv = heads
        shape = (sum(pages) + 5, hkv, page, 2 * dim)
        if strided:
            # pages x rows x heads in memory, heads apart
            kv = torch.randn(shape[0], page, hkv + 1, 2 * dim, generator=g)[:, :, :hkv]
            kv = kv.transpose(1, 2)
            fused = torch.randn(starts[-1] + spare_rows, hq + 3, dim, generator=g)
            query = fused.to(dtype)[:, 1 : hq + 1]
            out = torch.full((starts[-1] + spare_rows, dim, hq), POISON, dtype=dtype)
            out = out.transpose(1, 2)
        else:
            kv = torch.randn(shape, generator=g)
            query = torch.randn(starts[-1] + spare_rows, hq, dim, generator=g).to(dtype)
            out = torch.full_like(query, POISON)
        kv = kv.to(kv_dtype or dtype)
        # cached rows that belong to nobody must not matter
        used = torch.zeros(shape[0], page, dtype=torch.bool)
        for r, n in enumerate(lengths):
            for c in range(n):
                used[table[r, c // page], c % page] = True
        if kv.dtype.is_floating_point and kv.element_size() > 1:
            kv.transpose(1, 2)[~used] = float("nan")
        self.scale = dim**-0.5
        self.k_scale = self.v_scale = None
        if kv_dtype == torch.float8_e4m3fn:
            self.k_scale, self.v_scale = torch.tensor([0.7]), torch.tensor([1.3])
        self.query, self.kv, self.out = query, kv, out
        self.table, self.bits, self.slots = table, bits, slots
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.tails = torch.tensor(
            [len(r.parents) for r in requests] + [0] * padded_requests, dtype=torch.int32
        )

    def args(self, softcap: float = 0.0) -> tuple:
        def to(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(DEVICE)

        self.out_on_device = self.out.to(DEVICE).clone(memory_format=torch.preserve_format)
        return (
            to(self.query), to(self.kv), to(self.table), to(self.starts), to(self.lengths),
            to(self.tails), to(self.slots), to(self.bits), self.scale, self.out_on_device,
            softcap, to(self.k_scale), to(self.v_scale),
        )  # fmt: skip

    def reference(self, softcap: float = 0.0) -> Tensor:
        args = self.args(softcap)
        tree_attention_reference(*args)
        return self.out_on_device.cpu()

    def triton(self, softcap: float = 0.0, tiles: Tiles = SMALL) -> Tensor:
        heads, kv_heads = self.query.shape[1], self.kv.shape[1]
        workspace = TreeAttentionWorkspace(
            heads, kv_heads, self.dim, self.query.dtype, self.query.shape[0],
            self.table.shape[0], DEVICE, tiles,
        )  # fmt: skip
        args = self.args(softcap)
        workspace.plan(args[3], args[4])
        tree_attention_triton(*args, workspace=workspace)
        assert int(workspace.arrived.abs().sum()) == 0
        return self.out_on_device.cpu()

    def cpu(self) -> Tensor:
        args = self.args()
        if self.query.dtype not in SHIFTS:
            pytest.skip("the reference's")
        tree_attention_cpu(*args[:10])
        return self.out_on_device

    def dense(self, dtype: torch.dtype, softcap: float = 0.0) -> Tensor:
        """What the rows should be, computed in `dtype` with PyTorch."""
        out = torch.full(self.query.shape, POISON, dtype=dtype)
        hq, hkv = self.query.shape[1], self.kv.shape[1]
        head = torch.arange(hq) // (hq // hkv)
        for r, request in enumerate(self.requests):
            for i in range(request.rows):
                columns = torch.tensor(request.visible(i))
                pages = self.table[r][columns // self.page].long()
                # [L, Hq, 2d]
                kv = self.kv.float()[pages, :, columns % self.page][:, head].to(dtype)
                keys, values = kv[..., : self.dim], kv[..., self.dim :]
                if self.k_scale is not None:
                    keys = (keys * self.k_scale).to(dtype)
                    values = (values * self.v_scale).to(dtype)
                row = int(self.starts[r]) + i
                query = self.query[row].to(dtype)
                scores = torch.einsum("hd,lhd->hl", query, keys) * self.scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        return out

    def check(self, got: Tensor, softcap: float = 0.0) -> None:
        """Twice the error of PyTorch in the same dtype, and no row touched that is not ours."""
        truth = self.dense(torch.float64, softcap)[: self.rows]
        same = self.dense(self.query.dtype, softcap)[: self.rows]
        error = (got[: self.rows].double() - truth).abs().max().item()
        allowed = 2 * (same.double() - truth).abs().max().item() + 1e-5
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
        assert bool((got[self.rows :] == POISON).all())


def mixed(seed: int = 0) -> list[Request]:
    """A tree, a chain, plain decoding, a prefill chunk, a star, a chunk that ends in a tree."""
    g = torch.Generator().manual_seed(seed)
    return [
        Request(37, parents=random_parents(13, g)),
        Request(8, parents=chain(6)),
        Request(50, chunk=1),
        Request(0, chunk=21),
        Request(16, parents=star(9)),
        Request(5, chunk=4, parents=random_parents(7, g)),
        Request(3, parents=[-1]),
    ]


@paths
@pytest.mark.parametrize("strided", [False, True])
def test_mixed_batch_with_padding_equals_dense_attention(path: str, strided: bool) -> None:
    batch = Batch(mixed(), padded_requests=2, strided=strided)
    batch.check(getattr(batch, path)())


@paths
@pytest.mark.parametrize(
    ("dtype", "dim", "heads"),
    [
        (torch.float32, 64, (2, 1)),
        (torch.bfloat16, 64, (4, 4)),
        (torch.float16, 80, (6, 2)),
        (torch.bfloat16, 96, (7, 1)),
        (torch.bfloat16, 128, (8, 2)),
        (torch.float32, 128, (5, 5)),
        (torch.bfloat16, 256, (4, 1)),
    ],
)
def test_head_dims_and_types_with_their_default_tiles(
    path: str, dtype: torch.dtype, dim: int, heads: tuple[int, int]
) -> None:
    g = torch.Generator().manual_seed(dim)
    requests = [Request(150, parents=random_parents(21, g)), Request(3, chunk=5)]
    batch = Batch(requests, heads=heads, dim=dim, page=16, dtype=dtype, seed=dim)
    if path == "reference":
        batch.check(batch.reference())
    else:
        block_d = max(16, 1 << (dim - 1).bit_length())
        batch.check(batch.triton(tiles=default_tiles(dtype, block_d, heads[0] // heads[1])))


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softcap(path: str, dtype: torch.dtype) -> None:
    batch = Batch(mixed(1), dtype=dtype, dim=32)
    # small enough to bend most scores
    batch.check(getattr(batch, path)(softcap=0.8), softcap=0.8)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_fp8_cache_with_scales(path: str) -> None:
    batch = Batch(mixed(2), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, dim=32)
    batch.check(getattr(batch, path)())


@paths
@pytest.mark.parametrize("cached", [0, 1, 15, 16, 17, 32])
def test_prefix_lengths_around_page_and_tile_boundaries(path: str, cached: int) -> None:
    g = torch.Generator().manual_seed(cached)
    requests = [Request(cached, parents=random_parents(n, g)) for n in (1, 2, 16, 17, 33)]
    batch = Batch(requests, page=16, heads=(2, 1), seed=cached)
    batch.check(getattr(batch, path)())


@paths
def test_wide_and_deep_trees_of_several_mask_words(path: str) -> None:
    g = torch.Generator().manual_seed(3)
    requests = [
        Request(7, parents=chain(70)),
        Request(40, parents=star(65)),
        Request(0, parents=random_parents(97, g)),
    ]
    batch = Batch(requests, heads=(2, 1), seed=3)
    batch.check(getattr(batch, path)())


@pytest.mark.parametrize(("path", "batches"), [("reference", 50), ("triton", 4), ("cpu", 50)])
def test_random_trees(path: str, batches: int) -> None:
    g = torch.Generator().manual_seed(4)
    for seed in range(batches):
        sizes = torch.randint(1, 14, (20,), generator=g).tolist()
        cached = torch.randint(0, 30, (20,), generator=g).tolist()
        requests = [
            Request(c, parents=random_parents(n, g)) for c, n in zip(cached, sizes, strict=True)
        ]
        batch = Batch(requests, heads=(2, 1), page=4, seed=seed)
        batch.check(getattr(batch, path)())


def test_cut_blocks_are_merged_alike_whoever_arrives_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = torch.Generator().manual_seed(5)
    requests = [Request(700, parents=random_parents(19, g)), Request(90, parents=chain(5))]
    batch = Batch(requests, heads=(4, 2), seed=5)
    monkeypatch.setattr(workspace_module, "_DEFAULT_PROGRAMS", 64)
    workspace = TreeAttentionWorkspace(4, 2, 16, torch.float32, 64, 4, DEVICE, SMALL)
    if DEVICE == "cpu":
        # the interpreter runs one program after the other: in another order every time
        order = list(range(workspace.programs))
        original = interpreter_builder.set_grid_idx
        monkeypatch.setattr(
            interpreter_builder, "set_grid_idx", lambda x, y, z: original(order[x], y, z)
        )
    # in every other run nobody sees who arrived before, as when all arrive at once
    blind = False
    load = InterpreterBuilder.create_load

    def hide_volatile(self: InterpreterBuilder, pointer: TensorHandle, *rest: Any) -> TensorHandle:
        value = load(self, pointer, *rest)
        volatile = rest[-1]
        hide = blind and volatile
        return TensorHandle(np.zeros_like(value.data), value.dtype) if hide else value

    monkeypatch.setattr(InterpreterBuilder, "create_load", hide_volatile)
    outs = []
    for _ in range(4):
        args = batch.args()
        # the plan is one program
        with monkeypatch.context() as whole:
            if DEVICE == "cpu":
                whole.setattr(interpreter_builder, "set_grid_idx", original)
            workspace.plan(args[3], args[4])
        chunk = int(workspace.header[0])
        assert 719 // SMALL.block_n > 4 * chunk, "few parts: the test shows little"
        # what nobody wrote must not be read
        workspace.partial.fill_(float("nan"))
        workspace.partial_stats.fill_(float("nan"))
        tree_attention_triton(*args, workspace=workspace)
        assert int(workspace.arrived.abs().sum()) == 0
        batch.check(batch.out_on_device.cpu())
        outs.append(batch.out_on_device.cpu())
        blind = not blind
        if DEVICE == "cpu":
            order[:] = torch.randperm(len(order), generator=g).tolist()
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_a_step_without_rows_writes_nothing() -> None:
    batch = Batch([Request(0)], padded_requests=2)
    assert bool((batch.triton() == POISON).all())
    assert bool((batch.reference() == POISON).all())


def test_workspace_serves_steps_of_different_shapes_and_repeats_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(7)
    workspace = TreeAttentionWorkspace(4, 2, 16, torch.bfloat16, 128, 16, DEVICE, SMALL)
    steps = [
        mixed(8),
        [Request(300, parents=random_parents(9, g))],
        [Request(20, chunk=1) for _ in range(9)],
        mixed(8),
    ]
    outs = []
    for requests in steps:
        batch = Batch(requests, dtype=torch.bfloat16)
        args = batch.args()
        workspace.plan(args[3], args[4])
        tree_attention_triton(*args, workspace=workspace)
        batch.check(batch.out_on_device.cpu())
        outs.append(batch.out_on_device.cpu())
    assert torch.equal(outs[0], outs[3])


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_sees_what_its_path_sees_as_a_sequence(path: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(9)
    tree = Batch([Request(21, parents=random_parents(24, g))], page=4, dtype=dtype, seed=9)
    request = tree.requests[0]
    got = getattr(tree, path)()
    for node in range(24):
        nodes = [c - 21 for c in request.visible(node)[21:]]
        plain = Batch([Request(21, chunk=len(nodes))], page=4, dtype=dtype, seed=9)
        plain.query[: len(nodes)] = tree.query[nodes]
        for row, column in enumerate(request.visible(node)):
            source = tree.kv[tree.table[0, column // 4], :, column % 4]
            plain.kv[plain.table[0, row // 4], :, row % 4] = source
        alone = plain.reference()[: len(nodes)]
        if path == "reference":
            # exact, so that a tree and a chain leave the same rows in the next layer's cache
            assert torch.equal(got[nodes], alone)
        else:
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got[nodes], alone, rtol=tolerance, atol=tolerance)


def test_inert_slots_are_causal() -> None:
    batch = Batch([Request(9, chunk=6)])
    batch.tails[0], batch.slots[0] = 6, -1
    for path in ("reference", "triton", "cpu"):
        batch.check(getattr(batch, path)())


@pytest.mark.parametrize("cached", [0, 9])
def test_empty_bits_leave_a_row_its_context_and_itself(cached: int) -> None:
    # a parent of -1 everywhere: no node has an ancestor in the tail
    batch = Batch([Request(cached, parents=[-1] * 5)])
    batch.bits.zero_()
    for path in ("reference", "triton", "cpu"):
        batch.check(getattr(batch, path)())


def test_launcher_on_cpu_needs_no_workspace() -> None:
    batch = Batch(mixed())
    tree_attention(*batch.args())
    batch.check(batch.out_on_device.cpu())


def test_refusals_name_the_argument() -> None:
    batch = Batch([Request(4, chunk=2)])
    args = batch.args()
    with pytest.raises(ValueError, match="sliding_window=512 is not supported"):
        tree_attention(*args, sliding_window=512)
    with pytest.raises(ValueError, match="does not go with"):
        tree_attention(args[0], args[1].half(), *args[2:])
    with pytest.raises(ValueError, match="softcap must be >= 0"):
        tree_attention(*args[:10], -1.0)
    with pytest.raises(ValueError, match="kv_cache must be"):
        tree_attention(args[0], args[1][..., :-1], *args[2:])
    small = TreeAttentionWorkspace(4, 2, 16, torch.float32, 2, 1, DEVICE)
    with pytest.raises(ValueError, match="do not fit the workspace"):
        tree_attention(*args, workspace=small)
    with pytest.raises(ValueError, match="requests, room for"):
        small.plan(torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="share a key head"):
        default_tiles(torch.float32, 128, 65)
    with pytest.raises(ValueError, match="at most 32 may with 101376 bytes"):
        default_tiles(torch.bfloat16, 256, 33, shared=99 * 1024)
    with pytest.raises(ValueError, match="and 65536 bytes of shared memory"):
        default_tiles(torch.float16, 64, 1, shared=64 * 1024)
    with pytest.raises(ValueError, match="dimension of 512"):
        default_tiles(torch.bfloat16, 512, 1)


@pytest.mark.parametrize("kilobytes", [99, 163])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_gpus_with_less_shared_memory(kilobytes: int, dim: int) -> None:
    tiles = default_tiles(torch.bfloat16, dim, 2, kilobytes * 1024)
    assert tiles != default_tiles(torch.bfloat16, dim, 2) or (kilobytes, dim) == (163, 256)
    requests = [Request(70, parents=random_parents(21, torch.Generator().manual_seed(dim)))]
    batch = Batch(requests, heads=(4, 2), dim=dim, page=16, dtype=torch.bfloat16, seed=dim)
    batch.check(batch.triton(tiles=tiles))


def test_write_kv_skips_inert_rows_and_follows_strides() -> None:
    g = torch.Generator().manual_seed(10)
    cache = torch.full((5, 4, 2, 6), POISON).transpose(1, 2)
    key, value = torch.randn(4, 2, 3, generator=g), torch.randn(4, 2, 3, generator=g)
    slots = [7, -1, 19, 0]
    write_kv(key, value, cache, torch.tensor(slots))
    for row, slot in enumerate(slots):
        if slot >= 0:
            got = cache[slot // 4, :, slot % 4]
            assert torch.equal(got, torch.cat([key[row], value[row]], 1))
            cache[slot // 4, :, slot % 4] = POISON
    assert bool((cache == POISON).all())
