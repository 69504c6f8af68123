# SPDX-License-Identifier: Apache-2.0
"""The command's arguments, and what they do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu.quarter
from benchmarks import RESULTS, parser_of
from benchmarks.gpu.quarter.page import page
from benchmarks.gpu.quarter.questions import QUESTIONS
from benchmarks.gpu.quarter.runner import Runner
from benchmarks.gpu.quarter.store import ANSWERED, Answers

_ENVIRONMENT = {
    # Engines are built, and looked into, in their question's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit status is 1 while a question has no answer."""
    parser = parser_of(benchmarks.gpu.quarter.__doc__)
    names = [question.name for question in QUESTIONS]
    parser.add_argument("--seconds", type=float, default=430, help="of this call (default 430)")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--small", action="store_true", help="the tiny pair, for the simulated GPU")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "gpu", help="folder of quarter.json and quarter.md"
    )
    parser.add_argument("--logs", type=Path, help="folder of logs (default: quarter-logs there)")
    given = parser.parse_args(argv)
    questions = [question for question in QUESTIONS if question.name in given.only]
    answers = Answers(given.out / "quarter.json")
    if given.list:
        for one in questions:
            print(f"{one.name:9} {one.needs_s:4.0f} s, at most {one.limit_s:.0f}: {one.title}")
            print(f"{'':9} decides {one.decides}; {answers.status(one.name)}")
        return 0
    if not given.page:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logs = given.logs or given.out / "quarter-logs"
        Runner(answers, logs, given.seconds, given.small).run(questions)
    text = page(answers)
    (given.out / "quarter.md").write_text(text)
    print(text)
    return int(any(answers.status(one.name) != ANSWERED for one in questions))
