# SPDX-License-Identifier: Apache-2.0
"""What every launcher checks before it runs: shape, dtype and device, and which code to run.

One place, so that a wrong call reads the same for every op: the op, the argument, what was wanted,
what came.
"""

from __future__ import annotations

from torch import Tensor, dtype

__all__ = ["check", "on_gpu"]


def check(
    op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: dtype
) -> None:
    """Raise unless `tensor` has this shape (None = any size) and one of the dtypes (none = any).

    Raises:
        ValueError: wrong number of dimensions or a wrong size.
        TypeError: wrong dtype.
    """
    if tensor.dim() != len(shape) or any(
        want is not None and want != size for want, size in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} must have shape [{wanted}], got {list(tensor.shape)}")
    if dtypes and tensor.dtype not in dtypes:
        wanted = " or ".join(str(kind) for kind in dtypes)
        raise TypeError(f"{op}: {name} must be {wanted}, got {tensor.dtype}")


def on_gpu(tensor: Tensor) -> bool:
    """True where the Triton kernel runs, False where the PyTorch reference does."""
    return tensor.device.type == "cuda"
