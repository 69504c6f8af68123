# SPDX-License-Identifier: Apache-2.0
"""An op: its arguments, declared once, and its versions.

    @dataclass(slots=True)
    class Double(Op):
        x: Annotated[Tensor, "[R, N] int32"]            # fields are the arguments; see `checks`
        out: Annotated[Tensor, "[>= R, N] int32"]
        def triton(self):                               # on a GPU
            self.launch(_kernel, self.x.shape[0])

    double = public(Double, cpu="package.module")

`double(x, out)` checks its arguments and runs the version for the device. `double.triton` and
`double.cpu` run one version, unchecked. What an op computes is written down in `tests/references`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, ParamSpec, cast, get_type_hints

from torch import Tensor

from bastion_kernels.checks import Declared, check, declared, quick_check

_P = ParamSpec("_P")
# A kernel's parameter: its name, the argument that it is found in, and that argument's dimension if
# it is a stride or a size.
_Parameter = tuple[str, str, int | None, int | None]


class Arguments:
    """A dataclass some of whose fields are declared tensors."""

    __slots__ = ()
    declared: ClassVar[dict[str, Declared]]
    _fits: ClassVar[Callable[[Any], bool]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        found = {name: getattr(hints[name], "__metadata__", None) for name in cls.__annotations__}
        cls.declared = {name: declared(one[0]) for name, one in found.items() if one is not None}
        cls._fits = quick_check(cls.declared)

    def check_declared(self, op: str, **sizes: int) -> None:
        """Raise unless the fields are as declared, see `checks.check`."""
        if sizes or not self._fits():
            tensors = [getattr(self, name) for name in self.declared]
            check(op, tuple(self.declared), tensors, tuple(self.declared.values()), **sizes)


class Op(Arguments):
    """The arguments of one call. Subclasses are dataclasses with slots.

    A call raises ValueError (shapes, sizes, strides) or TypeError (dtypes) if its arguments do not
    fit together.
    """

    __slots__ = ()
    name: ClassVar[str]
    # By kernel: its parameters that `launch` finds in the arguments.
    _parameters: ClassVar[dict[int, list[_Parameter]]]

    def check(self) -> None:
        """Raise unless the arguments fit together."""
        self.check_declared(self.name)

    def triton(self) -> None:
        """Launch the Triton kernel."""
        raise NotImplementedError

    def launch(self, kernel: Any, *grid: int, **others: Any) -> None:
        """Launch a kernel; nothing to do if the grid is empty.

        A parameter of the kernel that is not among `others` has the name of an argument, or it is
        stride_x_r, argument x's stride in its dimension R, or a size of an argument, as declared.
        """
        if 0 in grid:
            return
        run = kernel[grid]
        parameters = self._parameters.get(id(kernel))
        if parameters is None:
            found = [self._find(name) for name in kernel.arg_names if name not in others]
            parameters = self._parameters[id(kernel)] = found
        for name, argument, stride, size in parameters:
            value = getattr(self, argument)
            if stride is not None:
                value = 0 if value is None else value.stride(stride)
            elif size is not None:
                value = value.shape[size]
            others[name] = value
        run(**others)

    @classmethod
    def _find(cls, name: str) -> _Parameter:
        if name in cls.__annotations__:
            return name, name, None, None
        if name.startswith("stride_"):
            argument, _, letter = name.removeprefix("stride_").rpartition("_")
            letters = [dim.removeprefix(">= ")[0].lower() for dim in cls.declared[argument].dims]
            return name, argument, letters.index(letter), None
        return next(
            (name, argument, None, one.names.index(name))
            for argument, one in cls.declared.items()
            if name in one.names
        )


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
    op = cast(type[Op], arguments)
    op.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op.__name__).lower()
    op._parameters = {}
    return PublicOp(arguments, op.name, cpu, device_of or next(iter(op.__annotations__)))
