# SPDX-License-Identifier: Apache-2.0
"""Argument checks of all ops: shape, dtype and strides, with one wording for every error."""

from __future__ import annotations

from torch import Tensor, dtype


def check(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    *dtypes: dtype,
    strided: bool = False,
) -> None:
    """Raise unless `tensor` has this shape (None = any size) and one of the dtypes.

    The last dimension must be contiguous unless `strided`; the others may have any stride.

    Raises:
        ValueError: wrong number of dimensions, a wrong size or stride.
        TypeError: wrong dtype.
    """
    if tensor.dim() != len(shape) or any(
        want is not None and want != size for want, size in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        kinds = " or ".join(str(kind) for kind in dtypes)
        raise TypeError(f"{op}: {name} must be {kinds}, got {tensor.dtype}")
    if not strided and shape and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: the last dimension of {name} must be contiguous")


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernel runs."""
    return tensor.device.type == "cuda"
