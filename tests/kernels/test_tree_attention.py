# SPDX-License-Identifier: Apache-2.0
"""Tree attention against dense masked attention, row by row, over explicitly gathered columns.

Shapes, types, windows by depth, sinks, soft caps and float8, alone and together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_batch import (
    DEVICE,
    POISON,
    SMALL,
    Batch,
    Request,
    attend,
    chain,
    mixed,
    paths,
    random_parents,
    star,
)
from op_helpers import refuses
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

import bastion_kernels.attention.workspace as workspace_module
from bastion_kernels.attention.workspace import TreeAttentionWorkspace, default_tiles

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOGETHER = {"window": 9, "sinks": True, "softcap": 0.8}


def trees(cached: int) -> list[Request]:
    g = torch.Generator().manual_seed(cached)
    return [Request(cached, parents=random_parents(n, g)) for n in (1, 2, 16, 17, 33)]


SHAPES: dict[str, tuple[list[Request], dict[str, Any]]] = {
    "padding": (mixed(), {"padded_requests": 2}),
    "strided rows": (mixed(), {"padded_requests": 2, "strided": True}),
    # around the ends of pages and tiles
    **{f"{n} cached": (trees(n), {"page": 16, "heads": (2, 1)}) for n in (0, 1, 15, 16, 17, 32)},
    "several mask words": (
        [Request(7, parents=chain(70)), Request(40, parents=star(65)),
         Request(0, parents=random_parents(97, torch.Generator().manual_seed(3)))],
        {"heads": (2, 1)},
    ),
    # Windows count depths: by their places in the cache the last siblings would lose the context.
    "siblings": ([Request(20, parents=star(41))], {"page": 1, "window": 8}),
    **{
        f"window {n}": (mixed(n), {"heads": (2, 1), "window": n, "seed": n, "padded_requests": 1})
        for n in (1, 2, 5, 16, 33, 10**6)
    },
    "sinks": (mixed(3), {"sinks": True, "heads": (6, 2)}),
    "float16 sinks": (mixed(3), {"sinks": True, "heads": (6, 2), "dtype": F16}),
    # small enough to bend most scores
    "softcap": (mixed(1), {"dim": 32, "softcap": 0.8}),
    "bfloat16 softcap": (mixed(1), {"dim": 32, "softcap": 0.8, "dtype": BF16}),
    "together": (mixed(4), {**TOGETHER, "strided": True, "padded_requests": 2}),
}  # fmt: skip


@paths
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_equal_dense_attention(path: str, shape: str) -> None:
    requests, sizes = SHAPES[shape]
    batch = Batch(requests, **sizes)
    batch.check(getattr(batch, path)())


@paths
@pytest.mark.parametrize(
    ("dtype", "dim", "heads"),
    [
        (F32, 64, (2, 1)), (BF16, 64, (4, 4)), (F16, 80, (6, 2)),
        (BF16, 96, (7, 1)), (BF16, 128, (8, 2)), (F32, 128, (5, 5)),
        (BF16, 256, (4, 1)), (BF16, 512, (2, 1)),
    ],
)  # fmt: skip
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


@pytest.mark.slow
def test_cut_blocks_are_merged_alike_whoever_arrives_last(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    requests = [Request(500, parents=random_parents(19, g)), Request(60, parents=chain(5))]
    batch = Batch(requests, heads=(4, 2), seed=5)
    monkeypatch.setattr(workspace_module, "_DEFAULT_PROGRAMS", 64)
    workspace = TreeAttentionWorkspace(4, 2, 16, torch.float32, 64, 4, DEVICE, SMALL)
    if DEVICE.type == "cpu":
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
            if DEVICE.type == "cpu":
                whole.setattr(interpreter_builder, "set_grid_idx", original)
            workspace.plan(args[3], args[4])
        chunk = int(workspace.header[0])
        assert 519 // SMALL.block_n > 4 * chunk, "few parts: the test shows little"
        # what nobody wrote must not be read
        workspace.partial.fill_(float("nan"))
        workspace.partial_stats.fill_(float("nan"))
        attend(*args, workspace=workspace, version="triton")
        assert int(workspace.arrived.abs().sum()) == 0
        batch.check(batch.out_on_device.cpu())
        outs.append(batch.out_on_device.cpu())
        blind = not blind
        if DEVICE.type == "cpu":
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
        attend(*args, workspace=workspace, version="triton")
        batch.check(batch.out_on_device.cpu())
        outs.append(batch.out_on_device.cpu())
    assert torch.equal(outs[0], outs[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_has_the_bits_of_its_path_as_a_sequence(dtype: torch.dtype) -> None:
    """The reference's, so that a tree and a chain leave the same rows in the next layer's cache."""
    g = torch.Generator().manual_seed(9)
    tree = Batch([Request(21, parents=random_parents(24, g))], page=4, dtype=dtype, seed=9)
    got = tree.reference()
    for node in range(24):
        nodes, alone = tree.path_alone(node)
        assert torch.equal(got[nodes], alone.reference()[: len(nodes)])


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


@paths
def test_sinks_of_nothing_take_nothing(path: str) -> None:
    batch = Batch(mixed(3), heads=(6, 2))
    batch.sinks = torch.full((6,), -torch.inf)
    batch.check(getattr(batch, path)())


FLOAT8 = [(BF16, E4M3), (F32, E5M2), (BF16, E5M2), (F16, E4M3), (F16, E5M2), (F32, E4M3)]


@paths
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*FLOAT8[:2], *(pytest.param(*kinds, marks=pytest.mark.slow) for kinds in FLOAT8[2:])],
)
def test_fp8_cache_with_scales(path: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for more in ({}, TOGETHER):
        batch = Batch(mixed(2), dtype=dtype, kv_dtype=kv_dtype, dim=32, **more)
        batch.check(getattr(batch, path)())


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_fp8_queries_with_a_scale(path: str, softcap: float) -> None:
    batch = Batch(mixed(2), dtype=BF16, kv_dtype=E4M3, query_dtype=E4M3, dim=32, softcap=softcap)
    batch.check(getattr(batch, path)())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("programs", "window"),
    [(13, 16), *(pytest.param(n, 128, marks=pytest.mark.slow) for n in (4, 64))],
)
def test_tiles_before_a_window_are_not_walked(
    programs: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "_DEFAULT_PROGRAMS", programs)
    g = torch.Generator().manual_seed(programs)
    requests = [
        Request(600, parents=random_parents(33, g)),
        Request(0, chunk=150),
        Request(300, chunk=40, parents=chain(9)),
        Request(333, chunk=1),
    ]
    batch = Batch(requests, heads=(4, 2), window=window, sinks=True, page=16, seed=window)
    # vLLM gives away blocks that no row sees any more
    for r, request in enumerate(requests):
        for column in range(request.cached + 1 - window):
            batch.kv[batch.table[r, column // 16].long(), :, column % 16] = 1e4
    walked = {}
    for some in (0, window):
        workspace = TreeAttentionWorkspace(
            4, 2, 16, torch.float32, 300, 4, DEVICE, window=some, max_tail=33
        )
        workspace.plan(batch.starts.to(DEVICE), batch.lengths.to(DEVICE))
        walked[some] = int((workspace.runs[:, 4] - workspace.runs[:, 3]).clamp(min=0).sum())
    assert walked[window] < walked[0] * (0.3 if window == 16 else 0.7)
    attend(*batch.args(), **batch.kinds(), workspace=workspace, version="triton")
    batch.check(batch.out_on_device.cpu())
    batch.check(batch.reference())


def test_refusals_name_the_argument() -> None:
    batch = Batch([Request(4, chunk=2)])
    args = batch.args()
    refuses("window and softcap must be >= 0", attend, *args, window=-1)
    refuses("which need depths", attend, *args, window=8)
    refuses("depths must have shape", attend, *args, window=8, depths=batch.depths[:1])
    refuses("sinks must be", attend, *args, sinks=torch.zeros(4, dtype=torch.float16))
    refuses("do not go with", attend, args[0], args[1].half(), *args[2:])
    refuses("window and softcap must be >= 0", attend, *args, softcap=-1.0)
    refuses("kv_cache must have shape", attend, args[0], args[1][..., :-1], *args[2:])
    small, no_rows = TreeAttentionWorkspace(4, 2, 16, torch.float32, 2, 1, DEVICE), torch.zeros(4)
    refuses("do not fit the workspace", attend, *args, workspace=small)
    refuses("requests, room for", small.plan, no_rows.int(), no_rows[:3].int())
    refuses("share a key head", default_tiles, F32, 128, 65)
    bf16, kb = torch.bfloat16, 1024
    refuses("at most 32 may with 101376 bytes", default_tiles, bf16, 256, 33, shared=99 * kb)
    refuses("and 65536 bytes of shared", default_tiles, torch.float16, 64, 1, shared=64 * kb)
    refuses("dimension of 512", default_tiles, bf16, 512, 1, shared=99 * kb)


@pytest.mark.parametrize("kilobytes", [99, 163])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_gpus_with_less_shared_memory(kilobytes: int, dim: int) -> None:
    tiles = default_tiles(torch.bfloat16, dim, 2, kilobytes * 1024)
    same_as_hopper = kilobytes == 163 and dim in (64, 256)
    assert (tiles == default_tiles(torch.bfloat16, dim, 2)) == same_as_hopper
    requests = [Request(70, parents=random_parents(21, torch.Generator().manual_seed(dim)))]
    batch = Batch(requests, heads=(4, 2), dim=dim, page=16, dtype=torch.bfloat16, seed=dim)
    batch.check(batch.triton(tiles=tiles))


@paths
@pytest.mark.parametrize(("dtype", "kinds"), [(F32, TOGETHER), (F16, {})])
def test_values_reach_the_rows_that_see_them_and_no_others(
    path: str, dtype: torch.dtype, kinds: dict[str, Any]
) -> None:
    """NaN and infinities: of one node of each tree, of a chain, and of a prompt's row."""
    clean = Batch(mixed(2), dtype=dtype, **kinds)
    usual, batch = getattr(clean, path)(), Batch(mixed(2), dtype=dtype, **kinds)
    hit = {0: (4, torch.nan), 1: (2, torch.inf), 3: (10, -torch.inf), 5: (6, torch.nan)}
    sees = torch.zeros(len(usual), dtype=torch.bool)
    for r, (row, value) in hit.items():
        request = batch.requests[r]
        column = request.cached + row
        page = batch.table[r, column // batch.page].long()
        batch.kv[page, :, column % batch.page, batch.dim + 3] = value
        for i in range(request.rows):
            sees[int(batch.starts[r]) + i] = column in request.visible(i, batch.window)
    got = getattr(batch, path)()
    assert sees[: batch.rows].any() and not sees.all()
    assert torch.equal(got[~sees], usual[~sees])
    rest = [c for c in range(batch.dim) if c != 3]
    assert torch.equal(got[..., rest], usual[..., rest])
    torch.testing.assert_close(
        got[sees][..., 3].float(), batch.dense(dtype)[sees][..., 3].float(), equal_nan=True
    )
