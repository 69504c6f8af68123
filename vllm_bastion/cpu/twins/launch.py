# SPDX-License-Identifier: Apache-2.0
"""What a twin is: a function with a Triton kernel's arguments, launched as that kernel is.

A twin's parameters are its kernel's, by name and in order, after `grid0` (`grid1`, `grid2`): the
number of programs. Of a kernel that differs between versions of vLLM it has every version's, and
gets None for those that the installed one lacks. It gets tensors as flat NumPy views that start
where the tensor does, so that it can go by the strides it is given; a 16-bit float tensor as
float32, rounded back afterwards, or as its bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_bastion.cpu.compiled import compiled

TWINS: dict[str, Twin] = {}
"""`package.module:kernel` -> its twin"""

_GRID = ("grid0", "grid1", "grid2")
# Launch options of Triton's that are no arguments of a kernel.
_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "launch_pdl"})
_HALF = (torch.bfloat16, torch.float16)


class Twin:
    """Stands in vLLM's module under the kernel's name.

    Args:
        target: the kernel, `package.module:name`.
        function: takes the grid's sizes and the kernel's arguments.
        source: `function` before it was compiled.
        bits: whether 16-bit floats are handed over as int16.
        some: parameters that only some versions of the kernel have.
    """

    def __init__(
        self,
        target: str,
        function: Callable[..., None],
        source: Callable[..., None],
        bits: bool,
        some: tuple[str, ...] = (),
    ) -> None:
        self.target, self.function, self._bits = target, function, bits
        parameters = inspect.signature(source).parameters
        self._all = tuple(name for name in parameters if name not in _GRID)
        self.names = self._all
        """of the kernel, in its order; before `fits`, of all its versions"""
        self.some = frozenset(some)
        self._dims = len(parameters) - len(self._all)
        self._defaults = dict.fromkeys(some) | {
            name: parameters[name].default
            for name in self._all
            if parameters[name].default is not inspect.Parameter.empty
        }

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether a kernel has the parameters of one of the versions; if so, take its order."""
        own = tuple(name for name in self._all if name in names or name not in self.some)
        if own == names:
            self.names = own
        return own == names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        if kwargs.keys() - set(self.names[len(args) :]) - _OPTIONS:
            raise TypeError(f"{self.target} has no parameters {sorted(kwargs)}")
        assert len(args) <= len(self.names)
        named = self._defaults | dict(zip(self.names, args, strict=False)) | kwargs
        given = [named[name] for name in self._all]
        values = [_value(item, self._bits) for item in given]
        self.function(*grid[: self._dims], *values)
        if self._bits:
            return
        for item, value in zip(given, values, strict=True):
            if isinstance(item, torch.Tensor) and item.dtype in _HALF:
                _flat(item).copy_(torch.from_numpy(value))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[..] to [n], from the first element to the last in memory, gaps included."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,))


def _value(item: Any, bits: bool) -> Any:
    if isinstance(item, torch.Tensor):
        flat = _flat(item)
        if item.dtype in _HALF:
            flat = flat.view(torch.int16) if bits else flat.float()
        return flat.numpy()
    # One type of number, so that nothing is compiled twice.
    return int(item) if isinstance(item, np.integer) else item


def twin(
    target: str, compile: bool = True, bits: bool = False, some: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the twin of the kernel `package.module:name`.

    `some`: the parameters of `function` that only some versions of the kernel have.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        callee = compiled(function) if compile else function
        TWINS[target] = Twin(target, callee, function, bits, some)
        return callee

    return register
