# SPDX-License-Identifier: Apache-2.0
"""What Numba compiles is found by the next process, and a bad cache never stops one."""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bastion_kernels.cpu import cache
from helpers import full_disk

pytest.importorskip("numba")

_SOURCE = """
from bastion_kernels.cpu.cache import njit

@njit
def inner(x):
    return x + {added}

@njit
def outer(x):
    return 2 * inner(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the machine code, not made yet."""
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "numba"


@pytest.fixture
def process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., ModuleType]:
    """Load the functions above as a new process does; what it logs is in `caplog`."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    path = tmp_path / "functions.py"

    def start(added: int = 1, seconds_old: int = 24 * 3600) -> ModuleType:
        path.write_text(_SOURCE.format(added=added))
        written = cache._LOADED - seconds_old
        os.utime(path, (written, written))
        spec = importlib.util.spec_from_file_location("functions", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "functions", module)
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        spec.loader.exec_module(module)
        sys.dont_write_bytecode = before
        cache._folder.cache_clear()
        monkeypatch.setattr(cache, "_warned", False)
        caplog.clear()
        return module

    return start


def hits(module: ModuleType) -> int:
    """How many of the functions' overloads came from the cache."""
    return sum(sum(function.stats.cache_hits.values()) for function in (module.outer, module.inner))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == cache.logger.name and r.levelno > 20]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def test_the_next_process_finds_what_was_compiled(
    folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = process()
    assert not folder.exists(), "nothing is written before something is compiled"
    assert first.outer(3) == 8 and hits(first) == 0
    assert len(files(folder)) == 2 and not warnings(caplog)
    second = process()
    assert second.outer(3) == 8 and hits(second) == 1  # the outer one has the inner one inside
    assert second.outer(0.5) == 3.0 and len(files(folder)) == 4
    assert all(path.stat().st_mode & 0o022 == 0 for path in [folder, *files(folder)])


def test_changed_sources_are_compiled_again(folder: Path, process: Any) -> None:
    assert process().outer(3) == 8
    changed = process(added=2)
    assert changed.outer(3) == 10 and hits(changed) == 0
    assert len(list(folder.iterdir())) == 2


def test_sources_that_changed_after_they_were_loaded_are_not_cached(
    folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert process(seconds_old=-3600).outer(3) == 8
    assert not folder.exists()
    assert "changed since this process started" in warnings(caplog)[0]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "garbage": lambda content: b"garbage" * 99,
    "cut": lambda content: content[:-1],
    "a flipped bit": _flipped,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_and_replaced(
    damage: str, folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert process().outer(3) == 8
    for path in files(folder):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = process()
    assert again.outer(3) == 8 and hits(again) == 0 and not warnings(caplog)
    mended = process()
    assert mended.outer(3) == 8 and hits(mended) == 1


def test_a_file_that_cannot_be_read_or_replaced_is_compiled_again(
    folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert process().outer(3) == 8
    for path in files(folder):
        path.unlink()
        path.mkdir()
    again = process()
    assert again.outer(3) == 8 and hits(again) == 0
    assert len(warnings(caplog)) == 1


def test_a_full_disk_is_no_error(
    folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = process()
    with full_disk(folder.parent):
        assert module.outer(3) == 8
        assert not files(folder), "no part of a file is left"
    assert len(warnings(caplog)) == 1 and "make room" in warnings(caplog)[0]


def test_a_folder_that_cannot_be_made_is_no_error(
    process: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a home that does not exist or is read-only."""
    monkeypatch.setenv("VLLM_BASTION_CACHE", "/dev/null/cache")
    assert process().outer(3) == 8
    (warning,) = warnings(caplog)
    assert "/dev/null/cache" in warning and "VLLM_BASTION_CACHE" in warning


@pytest.mark.parametrize(
    ("which", "mode", "trusted"),
    [
        (0, 0o757, False),
        (0, 0o775, True),  # as a umask of 002 makes it
        (1, 0o775, False),
        (1, 0o757, False),
        (2, 0o775, False),
        (2, 0o777, False),
    ],
)
def test_a_folder_that_others_can_write_is_refused(
    which: int, mode: int, trusted: bool, folder: Path, process: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert process().outer(3) == 8
    changed = (folder.parent, folder, *folder.iterdir())[which]
    changed.chmod(mode)
    again = process()
    assert again.outer(3) == 8 and hits(again) == trusted
    if not trusted:
        (warning,) = warnings(caplog)
        assert f"others can write to {changed}," in warning and "chmod go-w" in warning
        changed.chmod(0o755)
        mended = process()
        assert mended.outer(3) == 8 and hits(mended) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_is_refused(
    folder: Path, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert process().outer(3) == 8
    os.chown(folder, 65534, -1)
    again = process()
    assert again.outer(3) == 8 and hits(again) == 0
    assert "belongs to another user" in warnings(caplog)[0]


@pytest.mark.parametrize("name", ["VLLM_BASTION_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR"])
def test_where_the_cache_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last: a user without a home, as in a container that runs under any user id."""
    for other in ("VLLM_BASTION_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(other, raising=False)

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if name != "TMPDIR":
        monkeypatch.setenv(name, str(tmp_path))
    assert tmp_path in (cache.root(), *cache.root().parents)
