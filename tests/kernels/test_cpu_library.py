# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels: how they are compiled and kept, that nothing is read out of bounds."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bastion_kernels.cpu import cache, library
from helpers import ROOT, full_disk, run_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's version")

_CSRC = ROOT / "kernels" / "bastion_kernels" / "cpu" / "csrc"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the libraries, empty."""
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    # Before a test's call: pytest 9 listens to a logger that does not propagate, and to the root.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    # The real sources are compiled by the tests of the ops; this is about files.
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "small.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int four() { return 4; }'
    )
    monkeypatch.setattr(library, "_SOURCES", source)
    return tmp_path / "kernels"


def build() -> ctypes.CDLL:
    return library._build(*library._FLAGS)


def test_arguments_are_declared_in_the_sources() -> None:
    numbers, pointer = library.struct("Numbers"), ctypes.c_void_p
    assert numbers._fields_ == [("data", pointer), ("format", ctypes.c_int64)]
    keys = ["heads", "key_heads", "dim", "width"]
    fields = dict(library.struct("DeltaCommitArgs")._fields_)
    assert [*fields][:7] == ["paths", *keys, "keys", "keys_layer"]
    assert fields["paths"] is library.struct("CommitArgs") and fields["keys"] is numbers
    assert fields["updates"] is pointer and fields["updates_layer"] is ctypes.c_int64
    assert dict(library.struct("LayerArgs")._fields_)["softcap"] is ctypes.c_float


def test_a_library_is_kept_and_found_again(folder: Path) -> None:
    assert build().four() == 4
    (path,) = folder.iterdir()
    before = path.stat()
    assert build().four() == 4
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_damaged_library_is_built_again(folder: Path) -> None:
    build()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.unlink()  # a loaded file must not change
    path.write_bytes(content[:-1])
    assert build().four() == 4
    assert path.read_bytes() == content


def test_changed_sources_make_another_library(folder: Path) -> None:
    assert build().four() == 4
    source = library._SOURCES / "small.cpp"
    source.write_text(source.read_text().replace("return 4", "return 5"))
    assert build().four() == 5
    assert len(list(folder.iterdir())) == 2


def test_a_full_disk_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on the first start with a cache that has no room: the kernels are there all the same."""
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(folder.parent / "full"))
    with full_disk(folder.parent / "full"):
        assert build().four() == 4
        assert not list(folder.parent.glob("full/kernels/*")), "no part of a file is left"
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert "No space left" in warning and "make room in" in warning


def test_sources_that_do_not_compile_are_named(folder: Path) -> None:
    (library._SOURCES / "small.cpp").write_text("no code")
    with pytest.raises(library.CompileError, match=r"do not compile: g\+\+ [^$]*small.cpp"):
        build()


def test_no_compiler_is_said_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -v")
    with pytest.raises(library.CompileError, match=r"/nowhere/c\+\+ is not there: install g\+\+"):
        build()


def _race() -> None:
    assert build().four() == 4


def test_processes_may_race(folder: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_race) for _ in range(2)]
    for process in processes:
        process.start()
    assert [process.join() or process.exitcode for process in processes] == [0, 0]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tile registers are x86's")
def test_tile_registers_compile_on_every_host(tmp_path: Path) -> None:
    """Where the CPU has none, nothing else runs the compiler over their instructions."""
    flags = ["-march=sapphirerapids" if f == "-march=native" else f for f in library._FLAGS]
    assert "-march=sapphirerapids" in flags
    source, target = _CSRC / "attention.cpp", tmp_path / "attention.o"
    library._run((*library._compiler(), *flags, "-c", str(source), "-o", str(target)))
    assert target.stat().st_size > 0


def test_there_is_one_openmp_library() -> None:
    """A second one would have threads of its own, which compete with PyTorch's."""
    done = run_python(
        "import re, torch\nfrom bastion_kernels.cpu import library\n"
        "torch.ones(9) @ torch.ones(9)\nlibrary.load()\nassert library.threads_problem() is None\n"
        "print(set(re.findall(r'/\\S*lib[gi]omp\\S*', open('/proc/self/maps').read())))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(",") == 0 and "omp" in done.stdout, done.stdout


@pytest.mark.slow
def test_nothing_is_out_of_bounds() -> None:
    """The cases of the kernels' tests, with checks and with AMX tiles in software."""
    names = (
        "test_tree_attention_cpu", "test_tree_attention", "test_linear_cpu", "test_topk_logprobs",
        "test_gated_delta", "test_gated_delta_cpu", "test_short_conv",
    )  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.checked_build",
        "-m", "not thorough", "-k", "not triton and not reference",
        *(f"tests/kernels/{name}.py" for name in names),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
