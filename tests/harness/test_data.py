# SPDX-License-Identifier: Apache-2.0
"""The loading code of `benchmarks.e2e` over small files in each set's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e.data import SETS, load_set
from benchmarks.prompts import DataError, load_jsonl

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", tmp_path / "extracted")


def test_a_row_becomes_a_prompt(tmp_path: Path) -> None:
    rows = [{"instruction": "Sing.", "input": given, "output": "la"} for given in ("", "C")]
    found = load_set("alpaca", local=write(tmp_path / "rows.jsonl", rows))
    assert {one.turns for one in found} == {("Sing.",), ("Sing.\n\nInput:\nC",)}
    assert {one.id for one in found} == {"alpaca-0", "alpaca-1"}


def test_samples_are_the_papers_number_shuffled_by_the_seed(tmp_path: Path) -> None:
    rows = [{"question": str(i), "answer": ""} for i in range(200)]
    path = write(tmp_path / "rows.jsonl", rows)
    all_of_them = load_set("gsm8k", local=path)
    assert len(all_of_them) == 128 and len({one.turns for one in all_of_them}) == 128
    assert all_of_them[0].turns != ("0" + BOXED,)
    assert load_set("gsm8k", 5, local=path) == all_of_them[:5]
    assert load_set("gsm8k", 5, seed=1, local=path) != all_of_them[:5]
    counts = {name: known.samples for name, known in SETS.items()}
    assert counts["aime25"] == 30 and counts["humaneval"] == 164 and counts["mt-bench"] == 80
    assert len(SETS) == 8


def test_own_prompts_spec_bench_and_speed_bench(tmp_path: Path) -> None:
    own = write(
        tmp_path / "own.jsonl",
        [{"prompt": "a"}, {"id": "x", "domain": "d", "prompt": "b"}, {"turns": ["c", "d"]}],
    )
    found = {(one.set, one.id): one.turns for one in load_jsonl(own)}
    assert found == {("own", "0"): ("a",), ("d", "x"): ("b",), ("own", "2"): ("c", "d")}
    question = {"question_id": 81, "category": "writing", "turns": ["e", "f"]}
    (prompt,) = load_jsonl(write(tmp_path / "question.jsonl", [question]))
    assert (prompt.set, prompt.id, prompt.turns) == ("writing", "81", ("e", "f"))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "g"}]
    write(tmp_path / "qualitative.jsonl", [{"messages": messages, "category": "math"}] * 3)
    assert [one.turns for one in load_jsonl(tmp_path / "qualitative.jsonl", 2)] == [("g",)] * 2
    with pytest.raises(DataError, match=r"throughput_1k.jsonl is no file of JSON lines"):
        load_jsonl(tmp_path / "throughput_1k.jsonl")
    with pytest.raises(DataError, match='row 0 has no "prompt"'):
        load_jsonl(write(tmp_path / "bad.jsonl", [{"text": "a"}]))
