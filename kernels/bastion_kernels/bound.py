# SPDX-License-Identifier: Apache-2.0
"""An op with some of its arguments fixed, for launches outside CUDA graphs.

To find the compiled kernel, Triton looks at every argument of a launch, which takes longer than the
launch. If the kernel is not specialised on the arguments that change, the first launch of a batch
size finds it for all later ones.
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
    """See `PublicOp.bind`. `changing`: names of the arguments that a call takes, in order."""

    def __init__(self, op: Any, kept: dict[str, Any]) -> None:
        self._op, self._kept = op, kept
        self.changing = [name for name in op.arguments.__annotations__ if name not in kept]
        self._batch = self.changing.index(op.batch)
        # By batch size and which arguments are None.
        self._launches: dict[tuple[int, ...], Callable[..., None]] = {}

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
        ValueError: the kernel is specialised on one of them, or does not take it.
    """
    kernel, compiled, grid, arguments = launched
    names, free = kernel.arg_names, {*kernel.do_not_specialize}
    free.update(kernel.do_not_specialize_on_alignment)
    if wrong := [name for name in changing if name not in free or name not in names]:
        raise ValueError(f"{kernel.__name__} may be specialised on {', '.join(wrong)}")
    places = [names.index(name) for name in changing]
    kept = [None if name in changing else arguments[name] for name in names]
    run = compiled[(*grid, 1, 1)[:3]]

    def launch(*given: Any) -> None:
        values = [*kept]
        for place, value in zip(places, given):
            values[place] = value
        run(*values)

    return launch
