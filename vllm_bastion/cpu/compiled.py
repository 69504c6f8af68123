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

import numba

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
    """Compile at the first call with each combination of types, and keep the result.

    A division by zero gives what IEEE says, as on a device; the GIL is released.
    """
    user = numba.config.CACHE_DIR
    folder = user or _folder()
    if folder is not None:
        numba.config.CACHE_DIR = folder
        try:
            return numba.njit(function, cache=True, nogil=True, error_model="numpy")
        except RuntimeError:  # the folder is there, and not ours to write
            pass
        finally:
            numba.config.CACHE_DIR = user
    return numba.njit(function, nogil=True, error_model="numpy")
