# SPDX-License-Identifier: Apache-2.0
"""A replacement is a function with a Triton kernel's arguments, and is launched like that kernel.

A replacement's parameters are its kernel's, by name, after `grid0` (`grid1`, `grid2`): the number
of programs. Those that one of the supported versions of vLLM lacks have a default. Tensors arrive
as flat NumPy views that begin at the tensor's first element, so that the kernel's strides apply. A
tensor of 16-bit floats arrives as float32 and is rounded back afterwards.

A replacement takes a request's row out of such a view (`row_of`) before it uses an index that
follows from data. With NUMBA_BOUNDSCHECK=1, as in the tests, Numba then raises where a row would
reach into the next.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bastion_kernels.cpu.cache import njit

REPLACEMENTS: dict[str, Replacement] = {}
"""`package.module:kernel` -> its replacement"""

_GRID = ("grid0", "grid1", "grid2")
_HALF = (torch.bfloat16, torch.float16)


@njit
def row_of(flat, stride, index):
    """Row `index` of a flat view of rows."""
    return flat[index * stride : (index + 1) * stride]


class Replacement:
    """Replaces a kernel in vLLM's modules, under the kernel's name.

    Args:
        function: takes the grid's sizes and the kernel's arguments.
        source: `function` before it was compiled.
    """

    def __init__(self, function: Callable[..., None], source: Callable[..., None]) -> None:
        self.function = function
        parameters = inspect.signature(source).parameters
        self._all = tuple(name for name in parameters if name not in _GRID)
        self._dims = len(parameters) - len(self._all)
        self._names: tuple[str, ...] = ()  # of the installed vLLM's kernel, in its order
        self._defaults = {
            name: parameters[name].default
            for name in self._all
            if parameters[name].default is not inspect.Parameter.empty
        }

    def bind(self, names: tuple[str, ...]) -> bool:
        """Accept launches with the parameters of the installed vLLM's kernel.

        Returns False if they are not those that this was written for.
        """
        self._names = names
        return {*self._all} - {*self._defaults} <= {*names} <= {*self._all}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # Triton's launch options are among `kwargs`, and nothing reads them.
        given = self._defaults | dict(zip(self._names, args, strict=False)) | kwargs
        values: list[Any] = []
        rounded = []
        for name in self._all:
            value = given[name]
            if isinstance(value, torch.Tensor):
                flat = _flat(value)
                if value.dtype not in _HALF:
                    value = flat.numpy()
                else:
                    value = flat.float().numpy()
                    rounded.append((flat, value))
            elif isinstance(value, np.integer):
                value = int(value)  # so that nothing is compiled for each integer type
            values.append(value)
        self.function(*grid[: self._dims], *values)
        for flat, value in rounded:
            flat.copy_(torch.from_numpy(value))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view [n] from the first element to the last in memory, gaps included."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,))


def replacement(
    target: str, compile: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the replacement of the kernel `package.module:name`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        callee = njit(function) if compile else function
        REPLACEMENTS[target] = Replacement(callee, function)
        return callee

    return register
