# SPDX-License-Identifier: Apache-2.0
"""A replacement is a function with a Triton kernel's arguments, and is launched like that kernel.

A replacement's parameters are its kernel's, by name and in order, after `grid0` (`grid1`,
`grid2`): the number of programs. If a kernel differs between versions of vLLM, the replacement has
the parameters of all versions and gets None for those that the installed version lacks. Tensors
arrive as flat NumPy views that begin at the tensor's first element, so that the kernel's strides
apply. A tensor of
16-bit floats arrives as float32 and is rounded back afterwards, or as its bits.

A replacement takes a request's row out of such a view (`row_of`) before it uses an index that
follows from data. With NUMBA_BOUNDSCHECK=1, as in the tests, Numba then raises where a row would
reach into the next.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from bastion_kernels.cpu.cache import njit
from vllm_bastion.versions import capabilities

REPLACEMENTS: dict[str, Replacement] = {}
"""`package.module:kernel` -> its replacement"""

_GRID = ("grid0", "grid1", "grid2")
# Triton's launch options, which are not arguments of a kernel.
_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "launch_pdl"})
_HALF = (torch.bfloat16, torch.float16)


@njit
def row_of(flat, stride, index):
    """Row `index` of a flat view of rows."""
    return flat[index * stride : (index + 1) * stride]


class Replacement:
    """Replaces a kernel in vLLM's modules, under the kernel's name.

    Args:
        target: the kernel, `package.module:name`.
        function: takes the grid's sizes and the kernel's arguments.
        source: `function` before it was compiled.
        bits: pass 16-bit floats as int16.
        absent: parameters that the installed vLLM's kernel does not have.
        reads: tensors that the function only reads, so they are not rounded back.
    """

    def __init__(
        self,
        target: str,
        function: Callable[..., None],
        source: Callable[..., None],
        bits: bool,
        absent: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
    ) -> None:
        self.target, self.function, self._bits = target, function, bits
        self._reads = frozenset(reads)
        parameters = inspect.signature(source).parameters
        self._all = tuple(name for name in parameters if name not in _GRID)
        self.names = tuple(name for name in self._all if name not in absent)
        """of the installed vLLM's kernel, in its order"""
        # (arguments by position, names of the others) -> picks the function's arguments.
        self._order: dict[tuple[Any, ...], Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {}
        self._dims = len(parameters) - len(self._all)
        self._defaults = dict.fromkeys(absent) | {
            name: parameters[name].default
            for name in self._all
            if parameters[name].default is not inspect.Parameter.empty
        }

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether a kernel of the parameters `names` is the one that this was written for."""
        return self.names == names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # A call site always passes the same parameters by position and by name.
        form = (len(args), *kwargs)
        order = self._order.get(form)
        if order is None:
            order = self._order[form] = self._order_of(len(args), tuple(kwargs))
        given = order((*args, *kwargs.values(), *self._defaults.values()))
        values: list[Any] = []
        rounded = []
        for item in given:
            value = item
            if isinstance(item, torch.Tensor):
                value = _flat_view(item)
                if value is None:
                    flat = _flat(item)
                    value = (flat.view(torch.int16) if self._bits else flat.float()).numpy()
                    if not self._bits and self._all[len(values)] not in self._reads:
                        rounded.append((flat, value))
            elif isinstance(item, np.integer):
                value = int(item)  # so that nothing is compiled for each integer type
            values.append(value)
        self.function(*grid[: self._dims], *values)
        for flat, value in rounded:
            flat.copy_(torch.from_numpy(value))

    def _order_of(
        self, count: int, keywords: tuple[str, ...]
    ) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Picks the function's arguments from those by position, those by name, and the defaults.

        count: arguments by position. keywords: names of the others.
        """
        if set(keywords) - set(self.names[count:]) - _OPTIONS:
            raise TypeError(f"{self.target} has no parameters {sorted(keywords)}")
        assert count <= len(self.names) and len(self._all) > 1
        first = count + len(keywords)
        places = {name: i for i, name in enumerate(self._defaults, first)}
        # What is passed wins over a default of the same name.
        places |= {name: i for i, name in enumerate(keywords, count)}
        places |= {name: i for i, name in enumerate(self.names[:count])}
        return itemgetter(*(places[name] for name in self._all))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view [n] from the first element to the last in memory, gaps included."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,))


# (address, dtype, bytes) -> a flat view of that memory. Most tensors of a step are the same buffers
# as in the step before, and making a view takes longer than many kernels.
_views: dict[tuple[int, torch.dtype, int], np.ndarray] = {}
_MAX_VIEWS = 4096


def _flat_view(tensor: torch.Tensor) -> np.ndarray | None:
    """A flat NumPy view; None for 16-bit floats, which NumPy does not have."""
    if not tensor.is_contiguous():
        return None if tensor.dtype in _HALF else _flat(tensor).numpy()
    key = (tensor.data_ptr(), tensor.dtype, tensor.nbytes)
    view = _views.get(key)
    if view is None:
        if tensor.dtype in _HALF:
            return None
        view = tensor.numpy().reshape(-1)
        if len(view):
            # The view must not keep the tensor's memory alive: the next caller with this address
            # owns it.
            memory = (ctypes.c_byte * tensor.nbytes).from_address(key[0])
            view = np.frombuffer(memoryview(memory), view.dtype)
            if len(_views) >= _MAX_VIEWS:
                _views.clear()
            _views[key] = view
    return view


def replacement(
    target: str,
    compile: bool = True,
    bits: bool = False,
    reads: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the replacement of the kernel `package.module:name`.

    `reads`: the tensors that it only reads.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        callee = njit(function) if compile else function
        absent = capabilities().absent_kernel_parameters.get(target, ())
        REPLACEMENTS[target] = Replacement(target, callee, function, bits, absent, reads)
        return callee

    return register
