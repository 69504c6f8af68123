# SPDX-License-Identifier: Apache-2.0
"""An op: its arguments, declared once, and its versions.

    @dataclass(slots=True)
    class Double(Op):
        x: Annotated[Tensor, "[R, N] int32"]            # fields are the arguments; see `checks`
        out: Annotated[Tensor, "[>= R, N] int32"]
        def triton(self):                               # on a GPU
            self.launch(_kernel, self.x.shape[0])

    double = public(Double, cpu="package.module")

`double(x, out)` runs the version for the device, and checks its arguments in the first call with
that many rows. `double.triton` and `double.cpu` run one version, unchecked. `double.bind(out=out)`
is the op with `out` fixed. What an op computes is in `tests/references`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, ParamSpec, cast, get_type_hints

from bastion_kernels.bound import BoundOp, Launched
from bastion_kernels.checks import Declared, check, declared

_P = ParamSpec("_P")
# A kernel's parameter: its name, the op's argument that it comes from, and the argument's dimension
# if it is a stride, or if it is a size.
_Parameter = tuple[str, str, int | None, int | None]
# The rows of a call are those of the tensor with the first of these as its first dimension.
_BATCHES = ("R", "R + 1", "M", "P", "T")


class Op:
    """The arguments of one call. Subclasses are dataclasses with slots.

    A call raises ValueError (shapes, sizes, strides) or TypeError (dtypes) if its arguments do not
    fit together.
    """

    __slots__ = ()
    name: ClassVar[str]
    declared: ClassVar[dict[str, Declared]]
    # By kernel: its parameters that `launch` takes from the op's arguments.
    _parameters: ClassVar[dict[int, list[_Parameter]]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        found = {name: getattr(hints[name], "__metadata__", None) for name in cls.__annotations__}
        cls.declared = {name: declared(one[0]) for name, one in found.items() if one is not None}

    def check(self) -> None:
        """Raise unless the arguments fit together."""
        self.check_declared()

    def check_declared(self, **sizes: int) -> None:
        """Raise unless the arguments are as declared, see `checks.check`."""
        tensors = [getattr(self, name) for name in self.declared]
        check(self.name, tuple(self.declared), tensors, tuple(self.declared.values()), **sizes)

    def triton(self) -> Launched | None:
        """Launch the Triton kernel. An op that can be bound returns its only launch."""
        raise NotImplementedError

    def launch(self, kernel: Any, *grid: int, **others: Any) -> Launched | None:
        """Launch a kernel, unless the grid is empty.

        A parameter of the kernel that is not in `others` has the name of an argument of the op, or
        is stride_x_r, the stride of argument x in its dimension R, or is a size, as declared. For
        an argument that is None, strides and sizes are 0. A sequence and its strides are passed as
        tuples, an empty one as None.
        """
        if 0 in grid:
            return None
        run = kernel[grid]
        parameters = self._parameters.get(id(kernel))
        if parameters is None:
            found = [self._find(name) for name in kernel.arg_names if name not in others]
            parameters = self._parameters[id(kernel)] = found
        for name, argument, stride, size in parameters:
            value = getattr(self, argument)
            if isinstance(value, (list, tuple)):
                value = tuple(one.stride(stride) for one in value) if stride is not None else value
                value = tuple(value) or None
            elif stride is not None:
                value = 0 if value is None else value.stride(stride)
            elif size is not None:
                value = 0 if value is None else value.shape[size]
            others[name] = value
        return Launched(kernel, run(**others), grid, others)

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


def cdiv(size: int, part: int) -> int:
    """`size / part`, rounded up."""
    return -(-size // part)


def padded(size: int, least: int = 1) -> int:
    """The least power of two >= `size`; at least `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def load(module: str, name: str) -> Any:
    """Import a name on demand; GPU processes must not import the CPU modules."""
    return getattr(import_module(module), name)


class PublicOp(Generic[_P]):
    """The callable of an op; see `public`."""

    def __init__(self, arguments: Callable[_P, Op], name: str, cpu: str | None) -> None:
        self.__name__, self.__doc__ = name, arguments.__doc__
        self.arguments = cast(Any, arguments)  # the op's class
        first = {one.dims[0]: name for name, one in reversed(self.arguments.declared.items())}
        self.batch = next(first[dim] for dim in _BATCHES if dim in first)
        self._cpu = cpu
        self._loaded: Callable[[Op], None] | None = None
        self._checked = set[int]()  # numbers of rows

    def triton(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        self.arguments(*args, **kwargs).triton()

    def cpu(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._run_on_cpu(self.arguments(*args, **kwargs))

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        self.run(self.arguments(*args, **kwargs))

    def bind(self, **kept: Any) -> BoundOp:
        """The op with these arguments fixed, whose launches skip Triton's look at arguments.

        A call takes the others, by position. Between calls with the same number of rows only the
        contents and addresses of these tensors may change, and integers.
        """
        return BoundOp(self, kept)

    def run(self, call: Op) -> Launched | None:
        """Run the version for the device."""
        tensor = getattr(call, self.batch)
        rows = tensor.shape[0]
        if rows not in self._checked:
            call.check()
            self._checked.add(rows)
        if tensor.is_cuda or self._cpu is None:
            return call.triton()
        self._run_on_cpu(call)
        return None

    def _run_on_cpu(self, call: Op) -> None:
        if self._loaded is None:
            assert self._cpu is not None, f"{self.__name__} has no CPU version"
            self._loaded = load(self._cpu, self.__name__)
        self._loaded(call)


def public(arguments: Callable[_P, Op], *, cpu: str | None = None) -> PublicOp[_P]:
    """Make the callable of an op. Its name is the class's: `AcceptPath` makes `accept_path`.

    Args:
        arguments: the op's class.
        cpu: module of the CPU version, a function of that name whose argument is the op. Imported
            by the first call on a CPU. None: Triton only, on a CPU in its interpreter.
    """
    op = cast(type[Op], arguments)
    op.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op.__name__).lower()
    op._parameters = {}
    return PublicOp(arguments, op.name, cpu)
