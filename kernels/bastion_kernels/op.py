# SPDX-License-Identifier: Apache-2.0
"""An op: its arguments, declared once, and its versions.

    @dataclass(slots=True)
    class Double(Op):
        x: Tensor                        # fields are the arguments
        def check(self): ...             # raises if they do not fit together
        def triton(self): ...            # on a GPU

    double = public(Double, cpu="package.module")

`double(x)` checks its arguments and runs the version for the device. `double.triton(x)` and
`double.cpu(x)` run one version, unchecked. What an op computes is written down in
`tests/references`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, ParamSpec

import torch
from torch import Tensor

from bastion_kernels.checks import check

_P = ParamSpec("_P")


class Op:
    """The arguments of one call. Subclasses are dataclasses with slots.

    A call raises ValueError (shapes, sizes, strides) or TypeError (dtypes) if its arguments do not
    fit together.
    """

    __slots__ = ()
    name: ClassVar[str]

    def expect(
        self,
        argument: str,
        shape: tuple[int | None, ...],
        *dtypes: torch.dtype,
        strided: bool = False,
    ) -> None:
        """Raise unless this tensor argument has the shape and one of the dtypes; see `check`."""
        tensor = getattr(self, argument)
        # What nearly always holds is asked first: a step has about 50 such arguments.
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            check(self.name, argument, tensor, shape, *dtypes, strided=strided)

    def check(self) -> None:
        """Raise ValueError or TypeError if the arguments do not fit together."""
        raise NotImplementedError

    def triton(self) -> None:
        """Launch the Triton kernel."""
        raise NotImplementedError


def load(module: str, name: str) -> Any:
    """Import a name on demand; GPU processes must not import the CPU modules."""
    return getattr(import_module(module), name)


class PublicOp(Generic[_P]):
    """The callable of an op; see `public`."""

    def __init__(
        self, arguments: Callable[_P, Op], name: str, cpu: str | None, device_of: str
    ) -> None:
        self.__name__, self.__doc__ = name, arguments.__doc__
        self._arguments, self._cpu, self._device_of = arguments, cpu, device_of
        self._loaded: Callable[[Op], None] | None = None

        def triton(*args: _P.args, **kwargs: _P.kwargs) -> None:
            arguments(*args, **kwargs).triton()

        def cpu_version(*args: _P.args, **kwargs: _P.kwargs) -> None:
            self._run_on_cpu(arguments(*args, **kwargs))

        self.triton, self.cpu = triton, cpu_version
        self.triton.__name__, self.cpu.__name__ = f"{name}_triton", f"{name}_cpu"

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        call = self._arguments(*args, **kwargs)
        call.check()
        tensor: Tensor = getattr(call, self._device_of)
        if tensor.is_cuda or self._cpu is None:
            call.triton()
        else:
            self._run_on_cpu(call)

    def _run_on_cpu(self, call: Op) -> None:
        if self._loaded is None:
            assert self._cpu is not None, f"{self.__name__} has no CPU version"
            self._loaded = load(self._cpu, self.__name__)
        self._loaded(call)


def public(
    arguments: Callable[_P, Op], *, cpu: str | None = None, device_of: str | None = None
) -> PublicOp[_P]:
    """Make the callable of an op. Its name is the class's: `AcceptPath` makes `accept_path`.

    Args:
        arguments: the op's class.
        cpu: module of the CPU version, a function of that name whose argument is the op. Imported
            by the first call on a CPU. None: Triton only, on a CPU in its interpreter.
        device_of: the argument whose device selects the version; None: the first.
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", arguments.__name__).lower()
    arguments.name = name  # type: ignore[attr-defined]
    return PublicOp(arguments, name, cpu, device_of or next(iter(arguments.__annotations__)))
