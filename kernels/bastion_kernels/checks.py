# SPDX-License-Identifier: Apache-2.0
"""What the tensors of an op must be, declared in words, and one wording for every error.

    "[R, N + 1, *] int32 or int64"    sizes, then dtypes; none: any dtype
    "[>= R + 1] int32, strided"       strided: the last dimension need not be contiguous

A name has one size in all arguments of a call; a formula is of such names; * is any size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

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


@cache
def declared(text: str) -> Declared:
    """Parse a declaration."""
    found = re.fullmatch(r"\[(.*)\](?: ([\w ]+))?(, strided)?", text)
    assert found is not None, text
    dims = tuple(found[1].split(", "))
    kinds = (found[2] or "").split(" or ") if found[2] else []
    dtypes = [_KINDS.get(kind) or (getattr(torch, kind),) for kind in kinds]
    names = tuple(dim if dim.isidentifier() else None for dim in dims)
    formulas = [
        (i, compile(dim.removeprefix(">= "), text, "eval"))
        for i, dim in enumerate(dims)
        if not dim.isidentifier() and dim != "*"
    ]
    return Declared(dims, names, tuple(formulas), sum(dtypes, ()), found[3] is not None)


def check(
    op: str, names: Sequence[str], tensors: Sequence[Tensor | None], wanted: Sequence[Declared],
    **sizes: int,
) -> None:  # fmt: skip
    """Raise unless the tensors are as declared; None is not looked at.

    Args:
        op: for messages, as are the tensors' names.
        sizes: of names that are known already.

    Raises:
        ValueError: wrong number of dimensions, a wrong size or stride.
        TypeError: wrong dtype.
    """
    later = []
    for name, tensor, one in zip(names, tensors, wanted, strict=True):
        if tensor is None:
            continue
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
        if not (one.strided or tensor.is_contiguous()) and shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{op}: the last dimension of {name} must be contiguous")
        if one.formulas:
            later.append((name, tensor, one))
    for name, tensor, one in later:
        for i, formula in one.formulas:
            size, least = tensor.shape[i], eval(formula, _NO_GLOBALS, sizes)
            if size < least or (size > least and one.dims[i][0] != ">"):
                raise ValueError(_wrong_shape(op, name, tensor, one, sizes))


def quick_check(wanted: Mapping[str, Declared]) -> Callable[[Any], bool]:
    """Make a function that tells of an object with these attributes whether `check` would pass.

    False may also mean that a tensor is not contiguous as a whole. It takes half of `check`'s time,
    and a step has about 50 arguments.
    """
    lines, formulas, known = ["def fits(it):"], list[str](), set[str]()
    scope: dict[str, Any] = {}
    for i, (name, one) in enumerate(wanted.items()):
        scope[f"types{i}"] = one.dtypes
        lines += [f" x = it.{name}", " if x is not None:", f"  s{i} = s = x.shape"]
        wrong = [f"len(s) != {len(one.dims)}"]
        if one.dtypes:
            wrong.append(f"x.dtype not in types{i}")
        if not one.strided:
            wrong.append("not x.is_contiguous()")
        lines.append(f"  if {' or '.join(wrong)}: return False")
        for place, dim in enumerate(one.names):
            if dim in known:
                lines.append(f"  if s[{place}] != {dim}: return False")
            elif dim is not None:
                lines.append(f"  {dim} = s[{place}]")
                known.add(dim)
        for place, _ in one.formulas:
            wanted_size, sign = one.dims[place], "!="
            if wanted_size[0] == ">":
                wanted_size, sign = wanted_size.removeprefix(">= "), "<"
            formulas.append(
                f" if it.{name} is not None and s{i}[{place}] {sign} {wanted_size}: return False"
            )
    exec("\n".join([*lines, *formulas, " return True"]), scope)
    found: Callable[[Any], bool] = scope["fits"]
    return found


def check_one(op: str, name: str, tensor: Tensor, text: str, **sizes: int) -> None:
    """`check` of one tensor that is no argument of an `Op`."""
    check(op, (name,), (tensor,), (declared(text),), **sizes)


def _wrong_shape(op: str, name: str, tensor: Tensor, one: Declared, sizes: dict[str, int]) -> str:
    formulas, wanted = dict(one.formulas), []
    for i, dim in enumerate(one.dims):
        known = str(sizes.get(dim, dim))
        if i in formulas:
            at_least = ">= " if dim[0] == ">" else ""
            known = f"{at_least}{eval(formulas[i], _NO_GLOBALS, sizes)}"
        wanted.append(known)
    return f"{op}: {name} must have shape [{', '.join(wanted)}], got {list(tensor.shape)}"
