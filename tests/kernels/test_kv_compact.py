# SPDX-License-Identifier: Apache-2.0
"""KV compaction against a loop over rows that reads from a copy made beforehand, byte by byte."""

from __future__ import annotations

import pytest
import torch
from op_helpers import DEVICE, runs, versions
from torch import Tensor

from bastion_kernels import KVCaches, compact_caches
from bastion_kernels.attention.kv_layout import KVLayout
from tests import references

each = pytest.mark.parametrize("run", versions(compact_caches.triton, compact_caches.cpu))


def make_cache(
    blocks: int, heads: int, page: int, columns: int, dtype: torch.dtype, layout: str, seed: int
) -> Tensor:
    """A cache full of random bytes (NaNs among them), seen as [blocks, heads, page, columns]."""
    g = torch.Generator().manual_seed(seed)
    order = {"BHN": (0, 1, 2), "BNH": (0, 2, 1), "HBN": (1, 0, 2)}[layout]
    sizes = [(blocks, heads, page)[i] for i in order]
    raw = torch.randint(0, 256, (*sizes, columns * dtype.itemsize), generator=g).byte()
    inverse = [order.index(i) for i in range(3)]
    return raw.to(DEVICE).view(dtype).permute(*inverse, 3)


class Step:
    """Requests with tails of nodes, shuffled slots, and random paths down random trees."""

    def __init__(self, tails: list[int], width: int, groups: int, room: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        chunks = torch.randint(0, 4, (len(tails),), generator=g).tolist()
        rows = [chunk + tail for chunk, tail in zip(chunks, tails, strict=True)]
        starts = [0, *torch.tensor(rows).cumsum(0).tolist()]
        cu = [0, *torch.tensor(tails).cumsum(0).tolist()]
        self.roots = [end - tail for end, tail in zip(starts[1:], tails, strict=True)]
        total = starts[-1]
        self.slots = torch.stack(
            [torch.randperm(room, generator=g)[: total + 3] for _ in range(groups)]
        )
        self.path = torch.full((len(tails), width), -1, dtype=torch.int32)
        for r, tail in enumerate(tails):
            node, depth = 0, 0
            while depth < width and node < tail:
                self.path[r, depth] = node
                node += int(torch.randint(1, 4, (1,), generator=g))
                depth += 1
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.cu = torch.tensor(cu, dtype=torch.int32)

    def run(self, caches: KVCaches, run) -> None:
        run(caches, *(x.to(DEVICE) for x in (self.slots, self.starts, self.cu, self.path)))


def same_bytes(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def check(
    run, step: Step, caches: list[Tensor], groups: list[int],
    layouts: list[KVLayout | None] | None = None,
) -> None:  # fmt: skip
    """Run a step on caches; every byte is where the reference puts it."""
    expected = [cache.clone() for cache in caches]
    step.run(KVCaches(expected, groups, layouts), references.compact_caches)
    step.run(KVCaches(caches, groups, layouts), run)
    for cache, want in zip(caches, expected, strict=True):
        assert same_bytes(cache, want)


@each
@pytest.mark.parametrize("layout", ["BHN", "BNH", "HBN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_rows_move_along_the_path(run, layout: str, dtype: torch.dtype) -> None:
    caches = [make_cache(13, 2, 8, 12, dtype, layout, seed) for seed in range(3)]
    groups = [0, 1, 0]
    step = Step([9, 1, 20, 5], width=8, groups=2, room=13 * 8, seed=1)
    before = caches[0].clone()
    check(run, step, caches, groups)
    assert not same_bytes(caches[0], before), "nothing moves: the test shows nothing"


@each
def test_random_paths_shapes_and_odd_columns(run) -> None:
    g = torch.Generator().manual_seed(2)
    for seed in range(25):
        tails = torch.randint(1, 30, (int(torch.randint(1, 6, (1,), generator=g)),), generator=g)
        width = int(torch.randint(2, 18, (1,), generator=g))
        heads, columns = (3, 5) if seed % 2 else (1, 24)
        page = 16 if seed % 3 else 7
        cache = make_cache(40, heads, page, columns, torch.float16, "BNH", seed)
        step = Step(tails.tolist(), width, groups=1, room=40 * page, seed=seed)
        check(run, step, [cache], [0])


@each
def test_padded_strides_odd_addresses_and_long_paths(run) -> None:
    whole = make_cache(31, 3, 8, 40, torch.bfloat16, "BNH", 11)
    caches = [
        whole[:, :, :, :32],  # rows with gaps
        whole[1:31, 1:2],  # one head of several
        make_cache(61, 4, 8, 16, torch.bfloat16, "BNH", 12)[::2],  # blocks with gaps
        make_cache(30, 8, 8, 256, torch.bfloat16, "BNH", 13),  # several programs a row
        make_cache(31, 2, 8, 16, torch.uint8, "BHN", 14).flatten()[6:-250].view(30, 2, 8, 16),
    ]
    step = Step([120, 3, 60], width=33, groups=2, room=30 * 8, seed=8)
    for cache, group in zip(caches, [0, 1, 1, 0, 0]):  # one by one: two share their memory
        check(run, step, [cache], [group])


@runs(compact_caches)
def test_offsets_beyond_32_bits(run) -> None:
    stride = 2**31 + 5
    try:
        memory = torch.empty(stride + 100, dtype=torch.uint8, device=DEVICE)
    except RuntimeError:
        pytest.skip("needs 2 GiB of address space")
    cache = memory.as_strided((2, 1, 4, 5), (stride, 5, 5, 1))
    cache.copy_(torch.arange(40).view(2, 1, 4, 5))
    step = Step([4], width=3, groups=1, room=8, seed=9)
    step.slots[0, step.roots[0] :][:4] = torch.tensor([3, 0, 6, 7])
    step.path[0] = torch.tensor([0, 2, 3])
    step.run(KVCaches([cache], [0]), run)
    assert cache[0, 0, 0].tolist() == [30, 31, 32, 33, 34]
    assert cache[1, 0, 2].tolist() == [35, 36, 37, 38, 39]


@runs(compact_caches)
@pytest.mark.parametrize(
    ("tails", "paths"),
    [
        # identities, and a request that has finished
        ([6, 6, 1], [[0, 1, 2, 3, 4], [0, -1, 3, 4, 5], [0, -1, -1, -1, -1]]),
        # beyond the tail; the second is padding without rows, and its path is another step's
        ([3, 0], [[0, 3, 4, 5], [0, 2, 3, 4]]),
    ],
)
def test_paths_that_leave_every_byte(run, tails: list[int], paths: list[list[int]]) -> None:
    cache = make_cache(9, 2, 8, 8, torch.bfloat16, "BHN", 6)
    before = cache.clone()
    step = Step(tails, width=len(paths[0]), groups=1, room=72, seed=4)
    if tails[-1] == 0:
        step.starts[-1] = step.starts[-2]
    step.path[:] = torch.tensor(paths)
    step.run(KVCaches([cache], [0]), run)
    assert same_bytes(cache, before)


@each
def test_slots_of_minus_one_are_skipped(run) -> None:
    cache = make_cache(9, 2, 8, 8, torch.bfloat16, "BHN", 8)
    step = Step([12], width=5, groups=1, room=72, seed=6)
    step.path[0] = torch.tensor([0, 3, 5, 7, 9])
    root = step.roots[0]
    step.slots[0, root + 5] = -1
    step.slots[0, root + 3] = -1
    check(run, step, [cache], [0])


@each
def test_a_shared_cache_moves_once_and_aliased_groups_each_by_their_slots(run) -> None:
    cache = make_cache(30, 2, 8, 8, torch.bfloat16, "BHN", 9)
    step = Step([10], width=5, groups=2, room=120, seed=7)
    step.path[0] = torch.tensor([0, 2, 3, 7, 9])
    step.slots[1] = step.slots[0] + 120
    rows = step.slots[:, step.roots[0] : step.roots[0] + 10].flatten()
    assert len(set(rows.tolist())) == 20, "the groups' rows overlap"
    want = cache.clone()
    for group in (0, 1):
        step.run(KVCaches([want], [group]), references.compact_caches)
    caches = KVCaches([cache, cache, cache[:]], [0, 0, 1])
    assert len(caches.entries) == 2
    step.run(caches, run)
    assert same_bytes(cache, want)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="packed caches are a CPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_packed_caches(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    step = Step([9, 1, 13, 0, 16], width=8, groups=2, room=96, seed=5)
    shapes = [(6, 2, 16, 24), (6, 2, 16, 24), (3, 1, 32, 10), (6, 3, 16, 24)]
    rows = [make_cache(*shape, dtype, "BHN", seed) for seed, shape in enumerate(shapes)]
    places = {
        shape[2:]: torch.randperm(shape[2] * shape[3], generator=g).view(shape[2:]).int()
        for shape in shapes
    }
    layouts: list[KVLayout | None] = [KVLayout(places[shape[2:]]) for shape in shapes]
    layouts[3] = None
    packed = [
        cache.clone() if layout is None else references.kv_layout.packed(cache, layout)
        for cache, layout in zip(rows, layouts, strict=True)
    ]
    before = [cache.clone() for cache in packed]
    check(compact_caches.cpu, step, packed, [0, 1, 0, 1], layouts)
    assert not any(map(same_bytes, packed, before))
