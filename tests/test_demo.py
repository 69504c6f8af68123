# SPDX-License-Identifier: Apache-2.0
"""`make demo`: which pair it uses, and what it prints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import TINY
from benchmarks.demo import pair as pairs
from benchmarks.demo.drawing import draw_tree
from benchmarks.demo.pair import REAL, SHAPE, TINY_PAIR, CannotWrite, pair_of
from benchmarks.demo.questions import Streamed
from benchmarks.demo.run import load_note
from benchmarks.probes import SeenTree


@pytest.mark.parametrize(
    "need, said", [("_MEMORY_BYTES", "of memory are free"), ("_DISK_BYTES", "free, ")]
)
@pytest.mark.parametrize("name", [REAL, SHAPE])
def test_without_room_the_tiny_pair_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    need: str,
    said: str,
    name: str,
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "none" / "yet"))
    for one in ("_MEMORY_BYTES", "_DISK_BYTES"):
        monkeypatch.setattr(pairs, one, {name: 1 << 60 if one == need else 0})
    assert pair_of(name) is TINY_PAIR
    text = capsys.readouterr().out
    assert said in text and text.endswith(" needed.\n") and text.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_pair_that_cannot_be_written_is_reported_with_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "file"))
    for name in ("_MEMORY_BYTES", "_DISK_BYTES"):
        monkeypatch.setattr(pairs, name, {SHAPE: 0})
    with pytest.raises(CannotWrite, match="cannot be written"):
        pair_of(SHAPE).write()


def test_a_busy_machine_is_told() -> None:
    assert load_note(5.0) is None
    said = load_note(80.0)
    assert said is not None and "80%" in said and "speed-ups of this run mean nothing" in said


def test_a_streamed_answer_is_printed_piece_by_piece(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    texts = ["def one():\n    return 'déjà vu'  # …", "and a second"]
    rows = [{"domain": "code", "prompt": "Ask one."}, {"domain": "prose", "prompt": "Ask two."}]
    shown = Streamed(TINY / "target", "plain", rows)
    for number, text in enumerate(texts):
        seen = ""
        for token in tokenizer.encode(text).ids:  # a letter with an accent has two tokens
            shown((number, [token]))
            seen += capsys.readouterr().out
            assert "\N{REPLACEMENT CHARACTER}" not in seen
        assert seen.endswith(text) and rows[number]["prompt"] in seen
        assert seen.count(f"plain: {rows[number]['domain']}") == 1
    shown.end()
    assert capsys.readouterr().out == "\n\n"


def test_a_tree_is_drawn_with_its_accepted_path() -> None:
    # a - b - c with a second child d of the root and e of a; f is not verified.
    seen = SeenTree(
        request=0, position=1, root=ord("\n"), tokens=[*map(ord, "abcdef")],
        parents=[0, 1, 2, 0, 1, 5],
        log_rho=[math.log(rho) for rho in (0.5, 0.4, 0.3, 0.25, 0.05, 0.01)], num_verified=5,
        path=[0, 1, 5], emitted=[0],
    )  # fmt: skip
    assert draw_tree(seen, chr) == [
        "● ↵", "├─● a  0.5", "│ ├─○ b c  0.3", "│ └─● e  0.05", "└─○ d  0.25",
    ]  # fmt: skip
    drawn = "".join(draw_tree(seen, lambda token: "\x07 "))
    assert "\x07" not in drawn and "·" in drawn
    assert draw_tree(replace(seen, num_verified=0, path=[0]))[1:] == []
