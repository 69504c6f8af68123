# SPDX-License-Identifier: Apache-2.0
"""What the CPU's attention has of its own: packed caches, tiles of tokens, the bits of a path."""

from __future__ import annotations

import pytest
import torch
from attention_batch import Batch, Request, chain, mixed, random_parents, star
from op_helpers import using_threads
from torch import Tensor

from bastion_kernels.attention.kv_layout import (
    AMX,
    OTHER,
    VECTOR,
    KVLayout,
    _by_tiles,
    _by_vectors,
    learn_layout,
)
from bastion_kernels.cpu import library
from tests.references.kv_layout import packed, unpacked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's version")


def any_layout(page: int, dim: int) -> KVLayout:
    g = torch.Generator().manual_seed(page)
    return KVLayout(torch.randperm(page * 2 * dim, generator=g).view(page, 2 * dim).int())


def make(kind: int, page: int, dim: int) -> KVLayout:
    if kind == OTHER:
        return any_layout(page, dim)
    layout = KVLayout((_by_tiles if kind == AMX else _by_vectors)(page, dim))
    assert layout.kind == kind
    return layout


def long_and_short() -> list[Request]:
    """Several tiles of context, tails that begin anywhere, a chunk that ends in a tree."""
    g = torch.Generator().manual_seed(12)
    return [
        Request(37, chunk=100), Request(19, chunk=70, parents=random_parents(9, g)),
        Request(541, parents=random_parents(40, g)), Request(0, chunk=1),
        Request(288, parents=chain(16)), Request(150, chunk=1),
    ]  # fmt: skip


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kind", "page", "dim", "heads"),
    [
        (torch.bfloat16, AMX, 32, 64, (4, 2)), (torch.bfloat16, AMX, 128, 32, (7, 1)),
        (torch.float32, VECTOR, 64, 32, (3, 3)), (torch.float32, VECTOR, 32, 96, (4, 2)),
        (torch.bfloat16, VECTOR, 32, 32, (4, 2)), (torch.float32, AMX, 32, 32, (2, 1)),
        (torch.float16, OTHER, 16, 80, (2, 1)), (torch.float32, OTHER, 48, 16, (4, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "kv_dtype", [None, torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)]
)
def test_packed_caches(
    dtype: torch.dtype, kind: int, page: int, dim: int, heads: tuple[int, int],
    kv_dtype: torch.dtype | None, matrix: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tiles = kind == AMX and dtype == torch.bfloat16 and kv_dtype is None
    if matrix and not (tiles and library.has_tiles()):
        pytest.skip("by vectors anyway")
    monkeypatch.setattr(library, "has_tiles", lambda: matrix)
    sizes = {"dim": dim, "page": page, "dtype": dtype, "kv_dtype": kv_dtype}
    batch = Batch(long_and_short(), heads=heads, **sizes)
    batch.layout = make(kind, page, dim)
    batch.check(batch.cpu())
    batch = Batch(mixed(1), window=9, sinks=True, softcap=0.8, **sizes)
    batch.layout = make(kind, page, dim)
    batch.check(batch.cpu())


def test_a_tail_of_several_tiles() -> None:
    g = torch.Generator().manual_seed(14)
    requests = [Request(40, parents=random_parents(600, g)), Request(7, parents=star(300))]
    batch = Batch(requests, heads=(2, 1), dim=32, page=32)
    batch.layout = make(VECTOR, 32, 32)
    batch.check(batch.cpu())


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "kind"),
    [
        (torch.float32, None, VECTOR),
        (torch.bfloat16, None, AMX),
        (torch.bfloat16, None, OTHER),
        (torch.float32, torch.float8_e4m3fn, VECTOR),
    ],
)
@pytest.mark.parametrize("window", [0, 60, 400])
def test_a_path_has_the_bits_of_a_chain_of_any_length(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, kind: int, window: int
) -> None:
    g = torch.Generator().manual_seed(13)
    sizes = {"heads": (4, 2), "dim": 64, "page": 32, "window": window}
    requests = [Request(700, parents=random_parents(33, g))]
    tree = Batch(requests, dtype=dtype, kv_dtype=kv_dtype, **sizes)
    tree.layout = make(kind, 32, 64)
    got = tree.cpu()
    for node in range(33):
        nodes, alone = tree.path_alone(node)
        assert torch.equal(got[nodes], alone.cpu()[: len(nodes)])


def test_threads_change_no_bit() -> None:
    batch = Batch(long_and_short(), heads=(4, 2), dim=32, page=32, dtype=torch.bfloat16)
    batch.layout = make(AMX, 32, 32)
    got = []
    for count in (1, 2, 3):
        with using_threads(count):
            got.append(batch.cpu().clone())
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(("page", "dim"), [(16, 80), (128, 128), (512, 96)])
def test_a_layout_is_learned_from_what_writes_it(dtype: torch.dtype, page: int, dim: int) -> None:
    layout = any_layout(page, dim)

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        rows = torch.cat([key, value], 2).transpose(0, 1)[None]
        cache.copy_(packed(rows[:, :, slots], layout))

    learned = learn_layout(write, page, dim, dtype)
    assert torch.equal(learned.offsets, layout.offsets)
    rows = torch.randn(3, 2, page, 2 * dim).to(dtype)
    assert torch.equal(unpacked(packed(rows, learned), learned), rows)


def test_a_cache_that_is_not_exact_is_refused() -> None:
    def rounding(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache[0, 0] = torch.cat([key, value], 2)[:, 0].bfloat16()

    with pytest.raises(ValueError, match="as they are"):
        learn_layout(rounding, 32, 32, torch.float32)
