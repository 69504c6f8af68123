# SPDX-License-Identifier: Apache-2.0
"""`make demo`: which pair it uses, and how many threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.demo import pair as pairs
from benchmarks.demo.pair import SHAPE, TINY_PAIR, CannotWrite, pair_of
from benchmarks.demo.run import load_note

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "need, said", [("_MEMORY_BYTES", "of memory are free"), ("_DISK_BYTES", "free, ")]
)
def test_without_room_the_tiny_pair_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    need: str,
    said: str,
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "none" / "yet"))
    for name in ("_MEMORY_BYTES", "_DISK_BYTES"):
        monkeypatch.setattr(pairs, name, 1 << 60 if name == need else 0)
    assert pair_of(SHAPE) is TINY_PAIR
    text = capsys.readouterr().out
    assert said in text and text.endswith(" needed.\n") and text.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_pair_that_cannot_be_written_is_reported_with_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "file"))
    for name in ("_MEMORY_BYTES", "_DISK_BYTES"):
        monkeypatch.setattr(pairs, name, 0)
    with pytest.raises(CannotWrite, match="cannot be written"):
        pair_of(SHAPE).write()


@pytest.mark.parametrize("threads, unset", [(None, True), ("3", False)])
def test_make_demo_leaves_threads_to_the_user(threads: str | None, unset: bool) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    planned = subprocess.run(
        ["make", "-n", "demo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in planned.stdout.splitlines() if "-m benchmarks.demo" in line]
    assert ("-u OMP_NUM_THREADS" in line) == unset


def test_a_busy_machine_is_told() -> None:
    assert load_note(5.0) is None
    said = load_note(80.0)
    assert said is not None and "80%" in said and "speed-ups of this run mean nothing" in said
