# SPDX-License-Identifier: Apache-2.0
"""Functions compiled by Numba, with their machine code kept between processes.

Numba puts its cache beside the source, which a user's installation may not let it write, and takes
it for fresh as long as the one file is unchanged, whatever the file imports. Ours lies in the
plugin's cache, in a folder named after everything that is compiled here.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bastion_kernels.cpu.native import njit
from vllm_bastion import envs


@functools.cache
def _folder() -> str | None:
    """Where the machine code goes; None where nothing can be written."""
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *(here / "twins").glob("*.py")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = envs.cache_dir() / "numba" / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder)


def compiled(function: Callable[..., Any]) -> Any:
    """`njit` with its machine code in our folder; without one every process compiles anew."""
    folder = _folder()
    return njit(function, folder=folder or "", cache=folder is not None)
