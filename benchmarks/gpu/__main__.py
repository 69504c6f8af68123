# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.gpu`, and its page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks import RESULTS, parser_of
from benchmarks.gpu.questions import QUESTIONS
from benchmarks.gpu.runner import ANSWERED, Answers, Runner

_ENVIRONMENT = {
    # Engines are built, and looked into, in their question's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def page(answers: Answers) -> str:
    """Markdown of all answers so far, from their file alone."""
    lines = ["# A quarter of an hour on a GPU", ""]
    for number, call in enumerate(answers.calls):
        versions = ", ".join(f"{n} {call.get(n)}" for n in ("driver", "vllm", "torch", "triton"))
        where = f"`{call['command']}` at {str(call.get('commit'))[:7]}, {call['gpu']}, {versions}"
        lines.append(f"- Call {number}, {call['time']}: {where}")
    for question in QUESTIONS:
        status, entry = answers.status(question.name), answers.questions.get(question.name, {})
        lines += ["", f"## {question.title}", "", f"It decides {question.decides}. {status}"]
        if rows := entry.get("rows"):
            lines += ["", *_table(rows), "", f"Calls {sorted({row['call'] for row in rows})}."]
        if entry.get("error"):
            lines += ["", "```", *str(entry["error"]).strip().splitlines()[-6:], "```"]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every block of decoding, every traced part, every op, and every failed test."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if "blocks" in row:
            base = _seconds(row["blocks"], row["blocks"][0]["mode"])
            for mode in dict.fromkeys(block["mode"] for block in row["blocks"]):
                own = [block for block in row["blocks"] if block["mode"] == mode]
                total = {key: sum(one[key] for one in own) for key in own[0] if key != "mode"}
                found.append({
                    "part": row["part"], "mode": mode,
                    "of the first": base / _seconds(row["blocks"], mode),
                    "tau": total["emitted"] / max(1, total["forwards"]),
                    "nodes": total["verified"] / max(1, total["forwards"]),
                    "ms a step": total["step_ms"] / max(1, total["steps"]),
                    "draft, ms": total["draft_ms"] / max(1, total["steps"]),
                    "ms a token": 1e3 * total["seconds"] / max(1, total["tokens"]),
                    "replies equal the first's": f"{total['equal']} of {total['replies']}",
                })  # fmt: skip
        elif "outcome" in row:
            found.append({"test": row["part"], "outcome": row["outcome"], "": row["text"][-200:]})
        elif "op" in row:
            timing, judge = row.get("timing") or {}, row.get("judge_timing") or {}
            note = row.get("error") or row.get("verdict")
            us = {"us": timing.get("median"), "rival, us": judge.get("median")}
            found.append({"op": row["part"], **us, "": note})
        else:
            found.append({key: value for key, value in row.items() if key != "call"})
    lines, head = [], list[str]()
    for one in found:
        if list(one) != head:
            head = list(one)
            lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines.append(f"| {' | '.join(map(_cell, one.values()))} |")
    return lines[1:]


def _seconds(blocks: Sequence[dict[str, Any]], mode: str) -> float:
    return sum(block["seconds"] for block in blocks if block["mode"] == mode)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(own)}" for name, own in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else " ".join(str(value).replace("|", "/").split())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit status is 1 while a question has no answer."""
    parser, names = parser_of(benchmarks.gpu.__doc__), [question.name for question in QUESTIONS]
    parser.add_argument("--seconds", type=float, default=430, help="of this call (default 430)")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--small", action="store_true", help="the tiny pair, for the simulated GPU")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="of answers.json and .md")
    given = parser.parse_args(argv)
    questions = [question for question in QUESTIONS if question.name in given.only]
    answers = Answers(given.out / "answers.json")
    if given.list:
        for one in questions:
            print(f"{one.name:9} {one.needs_s:4.0f} s, at most {one.limit_s:.0f}: {one.title}")
            print(f"{'':9} decides {one.decides}; {answers.status(one.name)}")
        return 0
    if not given.page:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        Runner(answers, given.out / "logs", given.seconds, given.small).run(questions)
    (given.out / "answers.md").write_text(page(answers))
    print(page(answers))
    return int(any(answers.status(one.name) != ANSWERED for one in questions))


if __name__ == "__main__":
    raise SystemExit(main())
