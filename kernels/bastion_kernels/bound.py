# SPDX-License-Identifier: Apache-2.0
"""An op some of whose arguments stay, for launches that no graph holds.

Triton looks at every argument of a launch to find the compiled kernel, which takes longer than the
launch. The arguments that stay need no second look, nor do those that change if the kernel has no
variants by their values. Then the first launch of a batch size finds the kernel for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Launched(NamedTuple):
    """What a launch was."""

    kernel: Any
    compiled: Any  # Triton's `CompiledKernel`; None in the interpreter
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # of the kernel, and launch options


class BoundOp:
    """See `PublicOp.bind`. `changing` has the names of the arguments of a call, in order."""

    def __init__(self, op: Any, kept: dict[str, Any]) -> None:
        self._op, self._kept = op, kept
        self.changing = [name for name in op.arguments.__annotations__ if name not in kept]
        self._batch = self.changing.index(op.batch)
        # By batch size and absent arguments; None: to be run like any call.
        self._launches: dict[tuple[int, ...], Callable[..., None] | None] = {}

    def arguments(self, *given: Any) -> Any:
        """All arguments of a call."""
        return self._op.arguments(**self._kept, **dict(zip(self.changing, given)))

    def __call__(self, *given: Any) -> None:
        key = given[self._batch].shape[0], *[value is None for value in given]
        launch = self._launches.get(key)
        if launch is not None:
            launch(*given)
            return
        launched = self._op.run(self.arguments(*given))
        if launched is not None and launched.compiled is not None:
            self._launches[key] = _repeated(launched, self.changing[: len(given)])


def _repeated(launched: Launched, changing: list[str]) -> Callable[..., None]:
    """A launch of the same kernel with other arguments `changing`.

    Raises:
        ValueError: the kernel has variants by their values, or does not take all of them.
    """
    kernel, compiled, grid, arguments = launched
    names, free = kernel.arg_names, {*kernel.do_not_specialize}
    free.update(kernel.do_not_specialize_on_alignment)
    if wrong := [name for name in changing if name not in free or name not in names]:
        raise ValueError(f"{kernel.__name__} may have variants by {', '.join(wrong)}")
    places = [names.index(name) for name in changing]
    kept = [None if name in changing else arguments[name] for name in names]
    run = compiled[(*grid, 1, 1)[:3]]

    def launch(*given: Any) -> None:
        values = [*kept]
        for place, value in zip(places, given):
            values[place] = value
        run(*values)

    return launch
