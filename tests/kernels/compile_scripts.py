# SPDX-License-Identifier: Apache-2.0
"""Run the scripts that compile kernels, in a process in which Triton compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
needs_nvidia = pytest.mark.skipif(
    not (_TOOLS / "cuobjdump").exists(), reason="this Triton has no NVIDIA back end"
)


def printed(script: str, *arguments: str) -> list[str]:
    """The lines that a script beside this file prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parent.parent / "kernels")
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
