# SPDX-License-Identifier: Apache-2.0
"""Compile with Numba, and keep the machine code between processes.

The machine code of a package is in `<cache>/numba/<package>-<digest>`. The digest covers the
package's compiled sources, the versions of Python and Numba, and the CPU, so the files are never
stale. The digest is computed and the folder created when the first function is compiled.

Numba's own cache is not used: it writes beside the sources, raises if a file is damaged or the disk
is full, and checks one source file only. Here:

- An error while loading means "not found"; a file's checksum is verified first.
- An error while saving is logged once.
- Loaded files run as code, so a folder writable by other users is not used.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import pickle
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

# Below vLLM's logger, whose handler shows it.
logger = logging.getLogger("vllm.bastion.cpu.cache")

_DIGEST_BYTES = 32
_LOADED = time.time()
_warned = False
_COMPILES = re.compile(rb"\b(njit|native|inner|intrinsic|cfunc|replacement)\b")
# Division by zero follows IEEE 754, as on a GPU. No fastmath: results equal the references bit for
# bit. The GIL is released.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call with each combination of types."""
    import numba

    dispatcher = numba.njit(function, **_OPTIONS)
    dispatcher._cache = _cache_class()(function)
    return dispatcher


def native(function: Callable[..., Any]) -> Callable[[Any], None]:
    """Compile an op's CPU version, whose parameters have the names of the op's arguments.

    Tensors arrive as arrays. A parameter's default takes the place of None.
    """
    compiled, parameters = njit(function), inspect.signature(function).parameters
    defaults = {
        name: None if one.default is one.empty else one.default for name, one in parameters.items()
    }

    def run(op: Any) -> None:
        given = [(getattr(op, name), default) for name, default in defaults.items()]
        compiled(
            *[
                default if value is None else value.numpy() if isinstance(value, Tensor) else value
                for value, default in given
            ]
        )

    return run


def root() -> Path:
    """The cache folder of both packages; not created here.

    `VLLM_BASTION_CACHE`, else `vllm-bastion` in `XDG_CACHE_HOME` or `~/.cache`, else (for a user
    without a home) a per-user folder for temporary files.
    """
    try:
        if own := os.environ.get("VLLM_BASTION_CACHE"):
            return Path(own).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # HOME is unset and the user id is unknown
        return Path(tempfile.gettempdir()) / f"vllm-bastion-{os.getuid()}"
    return base / "vllm-bastion"


@functools.cache
def _cache_class() -> type:
    """A Numba cache with this module's policy. Defined lazily: a GPU process has no Numba."""
    from numba.core import caching
    from numba.core.serialize import dumps

    class Impl(caching.CompileResultCacheImpl):
        """Numba's conversion between a compile result and what can be pickled."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._lineno = function.__code__.co_firstlineno
            self._locator = SimpleNamespace(_py_file=function.__code__.co_filename)

    class Cache(caching.FunctionCache):
        """The machine code of one function, a file for each combination of types."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._py_func = function
            self._impl = Impl(function)
            self.enable()

        @property
        def cache_path(self) -> str | None:
            folder = _folder(_package(self._py_func), root())
            return None if folder is None else str(folder)

        def flush(self) -> None:
            """Files are never stale, so there is nothing to remove."""

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            target_context.refresh()
            try:
                path = self._path(sig, target_context.codegen())
                if not self._enabled or path is None or (content := read(path)) is None:
                    return None
                return self._impl.rebuild(target_context, pickle.loads(content))
            except Exception as error:
                logger.debug("%s is compiled again: %r", self._py_func.__qualname__, error)
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                path = self._path(sig, data.codegen)
                if not self._enabled or path is None or not self._impl.check_cachable(data):
                    return
                save(path, dumps(self._impl.reduce(data)))
            except Exception as error:
                _warn(str(error))

        def _path(self, sig: Any, codegen: Any) -> Path | None:
            folder = _folder(_package(self._py_func), root())
            if folder is None:
                return None
            key = hashlib.sha256(repr(self._index_key(sig, codegen)).encode()).hexdigest()[:24]
            name = f"{self._py_func.__module__.rpartition('.')[2]}.{self._py_func.__name__}"
            return folder / f"{name}-{key}"

    return Cache


def save(path: Path, content: bytes) -> bool:
    """Write atomically: other processes see the whole file or none. A digest follows the content.

    False if it cannot be written; the reason is logged once.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        _warn(f"{error}: make room in {root()}, or set VLLM_BASTION_CACHE")
        return False
    return True


def read(path: Path) -> bytes | None:
    """What `save` has written; None if it is not there or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def _package(function: Callable[..., Any]) -> str:
    """The function's `cpu` package, whose functions may call each other, or its module."""
    package, cpu, _ = function.__module__.partition(".cpu.")
    return f"{package}.cpu" if cpu else function.__module__


def host_cpu() -> str:
    """This CPU's name and instruction sets."""
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"


def _digest(package: str) -> str:
    """A digest of everything that the package's machine code depends on.

    Raises:
        OSError: a source changed after it was loaded.
    """
    import llvmlite
    import numba

    config = numba.config
    parts = [
        sys.version, numba.__version__, llvmlite.__version__, host_cpu(),
        config.OPT, config.BOUNDSCHECK, config.CPU_NAME, config.CPU_FEATURES,
    ]  # fmt: skip
    # The files' format is this module's.
    digest = hashlib.sha256(repr(parts).encode() + Path(__file__).read_bytes())
    path = Path(str(sys.modules[package].__file__))
    for file in sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]:
        source = file.read_bytes()
        if _COMPILES.search(source):
            if file.stat().st_mtime > _LOADED:
                raise OSError(f"{file} changed since this process started")
            digest.update(source)
    return digest.hexdigest()[:16]


@functools.cache
def _folder(package: str, cache: Path) -> Path | None:
    """The folder of the package's machine code; None if it cannot be used (logged once)."""
    name = package.removesuffix(".cpu").rpartition(".")[2]
    try:
        own = f"numba/{name}-{_digest(package)}"
    except OSError as error:
        _warn(str(error))
        return None
    return trusted_folder("numba") and trusted_folder(own)


def trusted_folder(name: str) -> Path | None:
    """The folder `name` in the cache folder, created; None if it cannot be used (logged once)."""
    if (reason := _unusable(name)) is not None:
        _warn(reason)
        return None
    return root() / name


def unwritable() -> str | None:
    """Why nothing can be stored in the cache folder, which is created; None if it can."""
    if (reason := _unusable()) is None and not os.access(root(), os.W_OK):
        return f"{root()} cannot be written: set VLLM_BASTION_CACHE to another folder"
    return reason


def _unusable(*names: str) -> str | None:
    """Why the cache folder, or those in it, cannot be created or trusted; None if they can."""
    cache = root()
    try:
        # An explicit mode, because a group-writable folder would be refused.
        for path in (cache, *(cache / name for name in names)):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            if reason := _problem(path, shared=path == cache):
                return reason
    except OSError as error:
        return f"{error}: see that {cache} can be written, or set VLLM_BASTION_CACHE"
    return None


def _problem(path: Path, shared: bool) -> str | None:
    """Why the content of a folder cannot be trusted, or None.

    shared: whether a group may write to it. That is safe for the cache folder: a folder of code
        that the group creates in it must pass this check itself.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user: set VLLM_BASTION_CACHE to a folder of your own"
    if status.st_mode & (stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP):
        return (
            f"others can write to {path}, and what is cached there runs as code: "
            f"chmod go-w it, or set VLLM_BASTION_CACHE to a folder of your own"
        )
    return None


def _warn(reason: str) -> None:
    """Log the first reason why machine code is not cached."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning("Compiled functions are not cached: %s", reason)
