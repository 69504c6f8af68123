# SPDX-License-Identifier: Apache-2.0
"""Argument checks of all ops: shape, dtype and strides, with one wording for every error."""

from __future__ import annotations

import torch
from torch import Tensor, dtype

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    *dtypes: dtype,
    strided: bool = False,
) -> None:
    """Raise unless `tensor` has this shape (None = any size) and one of the dtypes.

    The last dimension must be contiguous unless `strided`. Other dimensions may have any stride.

    Raises:
        ValueError: wrong number of dimensions, a wrong size or stride.
        TypeError: wrong dtype.
    """
    sizes = tensor.shape
    if not _fits(sizes, shape):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} must have shape [{wanted}], got {list(sizes)}")
    if tensor.dtype not in dtypes:
        kinds = " or ".join(str(kind) for kind in dtypes)
        raise TypeError(f"{op}: {name} must be {kinds}, got {tensor.dtype}")
    if strided or tensor.is_contiguous():  # the quickest to ask
        return
    if shape and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: the last dimension of {name} must be contiguous")


def _fits(sizes: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(sizes) != len(shape):
        return False
    for want, size in zip(shape, sizes):  # noqa: SIM110, a generator takes longer
        if want is not None and want != size:
            return False
    return True
