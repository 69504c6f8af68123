# SPDX-License-Identifier: Apache-2.0
"""A reference is written for the declared op; its callers pass the op's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bastion_kernels.op import Op

OF: dict[str, Callable[..., None]] = {}
"""The reference of every op, by the op's name."""


def of(declared: type[Op]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a function of the declared op a function of its arguments, and list it in `OF`."""

    def decorate(compute: Callable[[Any], None]) -> Callable[..., None]:
        def reference(*args: Any, **kwargs: Any) -> None:
            compute(declared(*args, **kwargs))

        reference.__name__ = f"{declared.name}_reference"
        OF[declared.name] = reference
        return reference

    return decorate
