# SPDX-License-Identifier: Apache-2.0
"""What the tensors of an op must be, declared in words, and one wording for every error.

    "[R, N + 1, *] int32 or int64"    sizes, then dtypes; none: any dtype
    "[>= R + 1] int32, strided"       strided: the last dimension need not be contiguous
    "G of [*, *] int32"               a sequence of G tensors

A name has one size in all arguments of a call; a formula is of such names; * is any size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor, dtype

_KINDS = {"float": (torch.float32, torch.bfloat16, torch.float16)}
_NO_GLOBALS: dict[str, object] = {"__builtins__": {}}


class Declared(NamedTuple):
    """A declaration, see the module."""

    dims: tuple[str, ...]
    names: tuple[str | None, ...]  # None for a dimension without a name
    formulas: tuple[tuple[int, CodeType], ...]  # dimension, its size or least size
    dtypes: tuple[dtype, ...]
    strided: bool
    length: str | None  # the name of a sequence's length


@cache
def declared(text: str) -> Declared:
    """Parse a declaration."""
    found = re.fullmatch(r"(?:(\w+) of )?\[(.*)\](?: ([\w ]+))?(, strided)?", text)
    assert found is not None, text
    dims = tuple(found[2].split(", "))
    kinds = found[3].split(" or ") if found[3] else []
    dtypes = [_KINDS.get(kind) or (getattr(torch, kind),) for kind in kinds]
    names = tuple(dim if dim.isidentifier() else None for dim in dims)
    formulas = [
        (i, compile(dim.removeprefix(">= "), text, "eval"))
        for i, dim in enumerate(dims)
        if not dim.isidentifier() and dim != "*"
    ]
    return Declared(dims, names, tuple(formulas), sum(dtypes, ()), found[4] is not None, found[1])


def check(
    op: str, names: Sequence[str], values: Sequence[Tensor | Sequence[Tensor] | None],
    wanted: Sequence[Declared], **sizes: int,
) -> None:  # fmt: skip
    """Raise unless the tensors are as declared; None is skipped.

    Args:
        op, names: for messages.
        sizes: those that are already known, by name.

    Raises:
        ValueError: wrong number of tensors or dimensions, a wrong size or stride.
        TypeError: wrong dtype.
    """
    later = []
    for name, value, one in zip(names, values, wanted, strict=True):
        if value is None:
            continue
        tensors = (value,) if isinstance(value, Tensor) else value
        if one.length is not None and sizes.setdefault(one.length, len(tensors)) != len(tensors):
            raise ValueError(f"{op}: {len(tensors)} {name}, not {sizes[one.length]}")
        for tensor in tensors:
            shape = tensor.shape
            fits = len(shape) == len(one.dims)
            for dim, size in zip(one.names, shape):
                if dim is not None and sizes.setdefault(dim, size) != size:
                    fits = False
            if not fits:
                raise ValueError(_wrong_shape(op, name, tensor, one, sizes))
            if one.dtypes and tensor.dtype not in one.dtypes:
                kinds = " or ".join(map(str, one.dtypes))
                raise TypeError(f"{op}: {name} must be {kinds}, got {tensor.dtype}")
            contiguous = one.strided or tensor.is_contiguous() or tensor.stride(-1) == 1
            if not contiguous and shape[-1] > 1:
                raise ValueError(f"{op}: the last dimension of {name} must be contiguous")
            if one.formulas:
                later.append((name, tensor, one))
    for name, tensor, one in later:
        for i, formula in one.formulas:
            size, least = tensor.shape[i], eval(formula, _NO_GLOBALS, sizes)
            if size < least or (size > least and one.dims[i][0] != ">"):
                raise ValueError(_wrong_shape(op, name, tensor, one, sizes))


def _wrong_shape(op: str, name: str, tensor: Tensor, one: Declared, sizes: dict[str, int]) -> str:
    formulas, wanted = dict(one.formulas), []
    for i, dim in enumerate(one.dims):
        known = str(sizes.get(dim, dim))
        if i in formulas:
            at_least = ">= " if dim[0] == ">" else ""
            known = f"{at_least}{eval(formulas[i], _NO_GLOBALS, sizes)}"
        wanted.append(known)
    return f"{op}: {name} must have shape [{', '.join(wanted)}], got {list(tensor.shape)}"
