# SPDX-License-Identifier: Apache-2.0
"""Inputs and poisoned outputs shared by the op tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from bastion_kernels.op import PublicOp
from tests.references import OF

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -7777

_Run = TypeVar("_Run", bound=Callable[..., None])


def versions(*runs: _Run) -> list[_Run]:
    """The versions of an op that run where the tests do: `cpu` on a CPU only."""
    return [run for run in runs if DEVICE.type == "cpu" or run.__name__ != "cpu"]


def runs(op: Any, *others: Any) -> pytest.MarkDecorator:
    """Parametrize `run` with all versions of an op, and others."""
    own = versions(OF[op.__name__], op.triton, *([op.cpu] if op._cpu else []))
    return pytest.mark.parametrize("run", [*others, *own])


def call(run: Callable[..., None], *given: Any, **named: Any) -> None:
    """Run an op on tensors of the CPU; a GPU's kernel gets copies of their whole memory there.

    Gaps between rows are copied there and back too, so that a stray write shows.
    """
    if DEVICE.type == "cpu" or run.__name__.endswith(("_reference", "cpu")):
        run(*given, **named)
        return
    memory: dict[int, tuple[Tensor, Tensor]] = {}

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        _, copy = memory.setdefault(storage.data_ptr(), (whole, whole.to(DEVICE)))
        seen = torch.empty(0, dtype=value.dtype, device=DEVICE)
        place = value.storage_offset(), value.shape, value.stride()
        return seen.set_(copy.untyped_storage(), *place)

    run(*map(there, given), **{name: there(value) for name, value in named.items()})
    for whole, copy in memory.values():
        whole.copy_(copy)


def refuses(match: str, run: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Assert that a call raises, and that the message says why."""
    if isinstance(run, PublicOp):
        run._checked.clear()  # as in the first call with so many rows
    with pytest.raises((TypeError, ValueError), match=match):
        run(*given, **named)


def names_wrong_arguments(op: Any, *given: Any) -> None:
    """Assert that an op names each tensor that has another type."""
    for at, (field, value) in enumerate(zip(fields(op.arguments), given, strict=False)):
        if isinstance(value, Tensor):
            wrong = value.to(torch.complex64)
            refuses(f"{op.__name__}: {field.name} ", op, *given[:at], wrong, *given[at + 1 :])


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """PyTorch with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose every element says "nobody wrote me"."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype)


def assert_same(actual: Any, expected: Any, name: str = "") -> None:
    """Bit-for-bit equal tensors or trees, NaN poison included."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


class Trees(NamedTuple):
    """Outputs of `expand_best_first`, in the order of its arguments."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_rho: Tensor
    num_nodes: Tensor


def poisoned_trees(reqs: int, slots: int, limit: int, wider: int = 0) -> Trees:
    """Outputs full of poison; with `wider` > 0 the rows are slices of longer ones."""
    width = limit + wider
    return Trees(
        poisoned(reqs, width, dtype=torch.int64)[:, :limit],
        poisoned(slots, width, dtype=torch.int32)[:, :limit],
        poisoned(slots, width, dtype=torch.int32)[:, :limit],
        poisoned(slots, width, dtype=torch.float32)[:, :limit],
        poisoned(slots, dtype=torch.int32),
    )


def prefixes(trees: Trees, row: int) -> list[tuple[int, ...]]:
    """Token path of every node of a row, in column order."""
    paths: list[tuple[int, ...]] = [()]
    for column in range(int(trees.num_nodes[row])):
        parent = int(trees.parents[row, column])
        assert 0 <= parent <= column, "a parent comes before its children"
        paths.append((*paths[parent], int(trees.tokens[row, column])))
        assert int(trees.depths[row, column]) == len(paths[-1])
    return paths[1:]


def lattice(
    reqs: int, depth: int, width: int, generator: torch.Generator, spread: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Distinct tokens and sorted log-probabilities `[R, D, K]`, as a drafter's top-K would be."""
    vocab = 4 * width + 3
    logits = spread * torch.randn(reqs, depth, vocab, generator=generator)
    best = logits.log_softmax(-1).topk(width, dim=-1)
    return best.indices.int(), best.values


def random_parents(limit: int, used: int, generator: torch.Generator) -> list[int]:
    """A random tree of `used` nodes in `limit` columns: parent numbers, -1 in unused columns."""
    drawn = torch.rand(used, generator=generator).tolist()
    return [int(u * (column + 1)) for column, u in enumerate(drawn)] + [-1] * (limit - used)


def shaped_parents(shape: str, limit: int, used: int, generator: torch.Generator) -> list[int]:
    """Parents of a chain, a star or a random tree."""
    if shape == "chain":
        return [*range(used), *[-1] * (limit - used)]
    if shape == "star":
        return [0] * used + [-1] * (limit - used)
    return random_parents(limit, used, generator)


def depths_of(parents: list[int]) -> list[int]:
    """Depth of every column's node, 0 in unused columns."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return depth[1:]
