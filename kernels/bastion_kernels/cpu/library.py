# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels in `csrc`, compiled for this CPU on first use and kept in the cache folder.

A library's name is a digest of the sources, flags, compiler and CPU, so it is never stale. It is
compiled in a temporary folder and saved if the cache has room, atomically, so processes may race. A
damaged file is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from bastion_kernels.cpu.cache import host_cpu, read, save, trusted_folder

# Below vLLM's logger, whose handler shows it.
logger = logging.getLogger("vllm.bastion.cpu.library")

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math", "-w",
)  # fmt: skip
_TORCH = Path(torch.__file__).parent  # its stable interface for C++
_MEMBERS = re.compile(r"^  (?:const )?(\w+)(\*?) ([\w, ]+);", re.MULTILINE)
_NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_EMULATED = 2  # tile registers, in a test build


class CompileError(RuntimeError):
    """The kernels cannot be compiled here; the message has the reason and the remedy."""


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """A struct of arguments, as `csrc` declares it: integers, floats, pointers, other structs."""
    text = "\n".join(path.read_text() for path in _sources())
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    fields: list[tuple[str, Any]] = []
    for kind, is_pointer, members in _MEMBERS.findall(found[1]):
        one = ctypes.c_void_p if is_pointer else _NUMBERS.get(kind) or struct(kind)
        fields += [(member, one) for member in members.split(", ")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def problem() -> str | None:
    """Why the kernels cannot be compiled on this host, as a sentence; None if a compiler exists."""
    command = _compiler()
    if shutil.which(command[0]):
        return None
    return (
        f"bastion's CPU kernels need a C++ compiler, and {command[0]} is not there: install "
        "g++, as for torch.compile (`apt-get install g++`), or set CXX to a compiler"
    )


def threads_problem() -> str | None:
    """Why the kernels run on one thread, as a sentence; None if they use PyTorch's threads."""
    if _load()[1]:
        return None
    return (
        "bastion's CPU kernels run on one thread: this process has no OpenMP library that fits "
        f"the compiler {shlex.join(_compiler())}; use g++, or preload the compiler's own library"
    )


def load() -> ctypes.CDLL:
    """The library; compiled now if it is not in the cache folder.

    Raises:
        CompileError: there is no C++ compiler, or it fails.
    """
    return _load()[0]


@lru_cache
def has_tiles() -> bool:
    """Whether there are AMX tile registers. Enables them for this process."""
    has = load().bastion_has_tiles()
    if has == _EMULATED:
        return True
    return bool(has) and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@lru_cache
def _load() -> tuple[ctypes.CDLL, bool]:
    """The library, and whether it runs on several threads.

    It is not linked against an OpenMP library, so its calls resolve to the one that PyTorch loaded:
    a second thread pool would compete with PyTorch's for the cores.
    """
    try:
        return _build(*_FLAGS, "-fopenmp"), True
    except OSError:  # this process has no matching OpenMP library
        return _build(*_FLAGS), False


def _compiler() -> list[str]:
    """The C++ compiler that torch.compile would use."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _build(*flags: str) -> ctypes.CDLL:
    """Load the library for these flags from the cache folder, or compile it."""
    key, folder = _key(flags), trusted_folder("kernels")
    path = None if folder is None else folder / f"{key}.so"
    if path is not None and read(path) is not None:
        return ctypes.CDLL(str(path))
    logger.info(
        "Compiling native code for this CPU, once: expect 15 s for the C++ kernels, and 30 s for "
        "Model Runner V2's functions as they are first used"
    )
    with tempfile.TemporaryDirectory() as name:
        built = _compile(Path(name), flags)
        if path is not None and save(path, built.read_bytes()):
            built = path
        return ctypes.CDLL(str(built))


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".h", ".cpp"))


def _key(flags: tuple[str, ...]) -> str:
    """A digest of everything that the machine code depends on."""
    found = shutil.which(_compiler()[0])
    if found is None:
        raise CompileError(problem())
    program = Path(found).resolve()
    status = program.stat()
    key = hashlib.sha256()
    file = program, status.st_size, status.st_mtime_ns
    for part in (*_compiler(), *flags, *file, host_cpu(), torch.__version__):
        key.update(f"{part}\0".encode())
    for path in _sources():
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    return key.hexdigest()[:24]


def _compile(folder: Path, flags: tuple[str, ...]) -> Path:
    """Compile all sources in parallel, then link; returns a library in `folder`."""
    compile_one = *_compiler(), *flags, f"-I{_TORCH / 'include'}", "-c"
    jobs = [
        (*compile_one, str(path), "-o", str(folder / f"{path.stem}.o"))
        for path in _sources()
        if path.suffix == ".cpp"
    ]
    _run(*jobs)
    built = folder / "kernels.so"
    # -fopenmp here would link the compiler's OpenMP library.
    link = [flag for flag in flags if flag != "-fopenmp"]
    objects = [job[-1] for job in jobs]
    libraries = f"-L{_TORCH / 'lib'}", "-ltorch_cpu"
    _run((*_compiler(), *link, "-shared", "-o", str(built), *objects, *libraries))
    return built


def _run(*commands: tuple[str, ...]) -> None:
    """Run the commands in parallel.

    Raises:
        CompileError: one fails; with the last lines of its output.
    """
    started = [
        (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        for command in commands
    ]
    failed = [
        (command, output)
        for command, process in started
        if (output := process.communicate()[0]) is not None and process.returncode != 0
    ]
    for command, output in failed:
        text = "\n".join(output.decode(errors="replace").splitlines()[-20:])
        raise CompileError(f"bastion's CPU kernels do not compile: {shlex.join(command)}\n{text}")
