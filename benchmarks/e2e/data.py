# SPDX-License-Identifier: Apache-2.0
"""The paper's data sets by Hugging Face `datasets`, with its prompts.

Ids, splits and prompts are those of DFlash's evaluation code, which the paper builds on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompts import DataError, Prompt, Row

_MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_HUB = "hf://datasets/"


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Args:
        path: id on the Hub; with `files`, the name of a builder of `datasets`.
        turns: the user turns of a row.
        samples: how many rows the paper uses.
        files: the files of a set whose own loading script `datasets` no longer runs.
    """

    path: str
    split: str
    turns: Callable[[Row], Sequence[str]]
    subset: str | None = None
    samples: int = 128
    files: tuple[str, ...] = ()


def _question(field: str) -> Callable[[Row], list[str]]:
    return lambda row: [row[field] + _MATH]


def _humaneval(row: Row) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def _livecodebench(row: Row) -> list[str]:
    starter = row.get("starter_code")
    form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    if starter:
        form, code = "Use the following code structure:", starter
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program\n\n"
        f"### Question:\n{row['question_content']}\n\n"
        f"### Format: {form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def _alpaca(row: Row) -> list[str]:
    given = row["input"]
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"]]


_LCB = _HUB + "livecodebench/code_generation_lite/"
SETS: dict[str, DataSet] = {
    "gsm8k": DataSet("openai/gsm8k", "test", _question("question"), "main"),
    "math500": DataSet("HuggingFaceH4/MATH-500", "test", _question("problem")),
    "aime25": DataSet("math-ai/aime25", "test", _question("problem"), samples=30),
    "humaneval": DataSet("openai/openai_humaneval", "test", _humaneval, samples=164),
    "mbpp": DataSet(
        "google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], "sanitized"
    ),
    # release_v2 is the first two files.
    "livecodebench": DataSet(
        "json", "test", _livecodebench, files=(_LCB + "test.jsonl", _LCB + "test2.jsonl")
    ),
    "mt-bench": DataSet(
        "HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"], samples=80
    ),
    "alpaca": DataSet("tatsu-lab/alpaca", "train", _alpaca),
}


def load_set(
    name: str, samples: int | None = None, seed: int = 0, local: Path | None = None
) -> list[Prompt]:
    """The prompts of a published set: as many as the paper uses, or `samples`, shuffled by `seed`.

    Args:
        local: a file with the set's rows (JSON lines, JSON, Parquet or CSV), in place of a
            download.

    Raises:
        DataError: `datasets` is missing, the set cannot be had, or its rows have other fields.
    """
    known = SETS[name]
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f'set "{name}" needs Hugging Face datasets: pip install ".[bench]"'
        ) from error
    datasets.disable_progress_bars()
    try:
        if local is not None or known.files:
            names = known.files if local is None else (str(local),)
            builder = {".parquet": "parquet", ".csv": "csv"}.get(Path(names[0]).suffix, "json")
            files = {known.split: list(names)}
            rows = datasets.load_dataset(builder, data_files=files, split=known.split)
        else:
            rows = datasets.load_dataset(known.path, known.subset, split=known.split)
        count = min(len(rows), known.samples if samples is None else samples)
        picked = rows.shuffle(seed=seed).select(range(count))
        return [
            Prompt(name, f"{name}-{i}", tuple(known.turns(row))) for i, row in enumerate(picked)
        ]
    except KeyError as error:
        raise DataError(f'set "{name}" has rows without the field {error}') from error
    except Exception as error:  # of the network, the Hub, a file system, or a builder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f'set "{name}" cannot be had ({reason}): name a copy with --data {name}=FILE'
        ) from error
