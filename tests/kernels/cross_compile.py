# SPDX-License-Identifier: Apache-2.0
"""Build kernels for a GPU that is not there: what the `compile_*.py` scripts share.

Triton itself takes a launch apart (tuples and absent pointers among the arguments), over a driver
that says what the GPU would be. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Gpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(capability: int, built: Callable[[str, Any], None]) -> None:
    """Make every kernel launch compile for sm_`capability` and hand name and kernel to `built`."""
    driver.set_active(Gpu(capability))
    launch = JITFunction.run

    def build(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        built(self.__name__, launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = build  # type: ignore[method-assign]


def read(kernel: Any, *command: str) -> str:
    """What one of the toolkit's programs says of a kernel's machine code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [TOOLS / command[0], *command[1:], file.name], capture_output=True, text=True
        )
    return done.stdout + done.stderr


def usage(kernel: Any) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    text = read(kernel, "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
