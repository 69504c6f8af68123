# SPDX-License-Identifier: Apache-2.0
"""The loading code of `benchmarks.e2e` over small files in each set's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e.data import LONG, SETS, SHORT, load_set
from benchmarks.prompts import DataError, load_jsonl

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONGBENCH = {"length": 9, "all_classes": None, "language": "en", "_id": "a1", "answers": ["x"]}
# A row as the set has it, and the prompt that the paper makes of it.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": (
        {"question": "2 apples, {3} pears?", "answer": "#### 5"},
        ["2 apples, {3} pears?" + BOXED],
    ),
    "math500": (
        {"problem": "$1+1$", "solution": "2", "answer": "2", "subject": "a", "level": 1},
        ["$1+1$" + BOXED],
    ),
    "aime25": ({"problem": "Find n.", "answer": "7", "id": "0"}, ["Find n." + BOXED]),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "mbpp": (
        {"task_id": 1, "prompt": "Write f.", "code": "", "test_list": ["assert f()"]},
        ["Write f."],
    ),
    "mt-bench": (
        {"prompt": ["First?", "And then?"], "reference": [], "category": "a", "prompt_id": 1},
        ["First?", "And then?"],
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1, 2", "output": "3", "text": ""},
        ["Add.\n\nInput:\n1, 2"],
    ),
    **{
        name: (
            {"context": "Far.", "input": "Near?", "dataset": name, **LONGBENCH},
            ["Far.\n\nNear?"],
        )
        for name in LONG
    },
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", tmp_path / "extracted")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_the_papers_prompt(name: str, tmp_path: Path) -> None:
    row, turns = ROWS[name]
    (prompt,) = load_set(name, local=write(tmp_path / "rows.jsonl", [row]))
    assert prompt.turns == tuple(turns) and (prompt.set, prompt.id) == (name, f"{name}-0")


def test_livecodebench_asks_for_code_alone_in_the_form_of_its_starter(tmp_path: Path) -> None:
    rows = [
        {"question_content": "Sum.", "starter_code": "class S:", "question_id": "1"},
        {"question_content": "Sum.", "starter_code": "", "question_id": "2"},
    ]
    with_starter, without = load_set(
        "livecodebench", local=write(tmp_path / "a.jsonl", rows[:1])
    ) + (load_set("livecodebench", local=write(tmp_path / "b.jsonl", rows[1:])))
    assert "anything except for the program\n\n### Question:\nSum.\n\n" in with_starter.turns[0]
    assert (
        "### Format: Use the following code structure:\n```python\nclass S:\n```"
        in (with_starter.turns[0])
    )
    assert (
        "following format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the"
        in (without.turns[0])
    )


def test_an_alpaca_row_without_input_is_its_instruction(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"instruction": "Sing.", "input": "", "output": "la"}])
    assert load_set("alpaca", local=path)[0].turns == ("Sing.",)


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
    assert {counts[name] for name in LONG} == {128} and len(SHORT) == 8 and len(LONG) == 7


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
