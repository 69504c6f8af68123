# SPDX-License-Identifier: Apache-2.0
"""A twin is a function with a Triton kernel's arguments, and is launched like that kernel.

A twin's parameters are its kernel's, by name and in order, after `grid0` (`grid1`, `grid2`): the
number of programs. If a kernel differs between versions of vLLM, the twin has the parameters of all
versions and gets None for those that the installed version lacks. Tensors arrive as flat NumPy
views that begin at the tensor's first element, so that the kernel's strides apply. A tensor of
16-bit floats arrives as float32 and is rounded back afterwards, or as its bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bastion_kernels.cpu.cache import njit
from vllm_bastion.versions import capabilities

TWINS: dict[str, Twin] = {}
"""`package.module:kernel` -> its twin"""

_GRID = ("grid0", "grid1", "grid2")
# Triton's launch options, which are not arguments of a kernel.
_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "launch_pdl"})
_HALF = (torch.bfloat16, torch.float16)


class Twin:
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
        self._sources: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        self._dims = len(parameters) - len(self._all)
        self._defaults = dict.fromkeys(absent) | {
            name: parameters[name].default
            for name in self._all
            if parameters[name].default is not inspect.Parameter.empty
        }

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether a kernel of the parameters `names` is the one that the twin was written for."""
        return self.names == names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # A call site always passes the same parameters by position and by name.
        form = (len(args), *kwargs)
        sources = self._sources.get(form)
        if sources is None:
            sources = self._sources[form] = self._sources_of(len(args), tuple(kwargs))
        values, rounded = [], []
        for name, (given, what) in zip(self._all, sources, strict=True):
            item = args[what] if given == "args" else kwargs[what] if given == "kwargs" else what
            if isinstance(item, torch.Tensor):
                half = item.dtype in _HALF
                value = _array(item, half, self._bits)
                if half and not self._bits and name not in self._reads:
                    rounded.append((item, value))
            else:
                # Always an int, so that nothing is compiled for each integer type.
                value = int(item) if isinstance(item, np.integer) else item
            values.append(value)
        self.function(*grid[: self._dims], *values)
        for item, value in rounded:
            _flat(item).copy_(torch.from_numpy(value))

    def _sources_of(self, count: int, keywords: tuple[str, ...]) -> list[tuple[str, Any]]:
        """Where each parameter of the function comes from, with `count` arguments by position."""
        if set(keywords) - set(self.names[count:]) - _OPTIONS:
            raise TypeError(f"{self.target} has no parameters {sorted(keywords)}")
        assert count <= len(self.names)
        by_position = {name: i for i, name in enumerate(self.names[:count])}
        return [
            ("args", by_position[name])
            if name in by_position
            else ("kwargs", name)
            if name in keywords
            else ("default", self._defaults[name])
            for name in self._all
        ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view [n] from the first element to the last in memory, gaps included."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,))


def _array(tensor: torch.Tensor, half: bool, bits: bool) -> Any:
    if half:
        flat = _flat(tensor)
        return (flat.view(torch.int16) if bits else flat.float()).numpy()
    if not tensor.is_contiguous():
        tensor = _flat(tensor)
    values = tensor.numpy()
    # NumPy's reshape is faster than PyTorch's, and most tensors are flat already.
    return values if values.ndim == 1 else values.reshape(-1)


def twin(
    target: str,
    compile: bool = True,
    bits: bool = False,
    reads: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the twin of the kernel `package.module:name`.

    `reads`: the tensors that it only reads.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        callee = njit(function) if compile else function
        absent = capabilities().absent_kernel_parameters.get(target, ())
        TWINS[target] = Twin(target, callee, function, bits, absent, reads)
        return callee

    return register
