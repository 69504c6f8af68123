# SPDX-License-Identifier: Apache-2.0
"""What every launcher checks before it runs: shape, dtype and strides; and which version it runs.

One place, so that a wrong call reads the same for every op: the op, the argument, what was wanted,
what came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, dtype

from bastion_kernels.cpu.native import HAVE_NUMBA

__all__ = ["check", "on_gpu", "version_for"]

_Op = TypeVar("_Op", bound=Callable[..., None])


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


def version_for(tensor: Tensor, triton: _Op, cpu: _Op, reference: _Op) -> _Op:
    """The version of an op that runs where `tensor` is; the reference needs nothing but PyTorch."""
    if on_gpu(tensor):
        return triton
    return cpu if HAVE_NUMBA else reference
