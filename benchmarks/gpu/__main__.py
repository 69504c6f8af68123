# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.gpu`: asks one question after another, and writes the page.

`answers.jsonl` has a row `run` for each call and a row `asked` for each attempt at a question, with
its `status`, its `seconds`, and the end of what it printed. A question's last row counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu
from benchmarks import RESULTS, parser_of
from benchmarks.e2e.store import Row, Store, read_rows
from benchmarks.gpu.questions import QUESTIONS, Question, ask
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.provenance import FOLDER, command_line, provenance

ANSWERED, INTERRUPTED, FAILED, UNASKED = "answered", "interrupted", "failed", "not asked"
# To end a process and to write what is left; lines kept of a log, which is a file.
_RESERVE_S, _LINES = 15.0, 40


def statuses(rows: Sequence[Row]) -> dict[str, str]:
    """Of the questions that have been asked."""
    return {row["question"]: row["status"] for row in rows if row["kind"] == "asked"}


def order(questions: Sequence[Question], known: dict[str, str]) -> list[Question]:
    """Those without an answer: first those that were never asked, last those that failed."""
    turns = (UNASKED, INTERRUPTED, FAILED)
    open_ = [one for one in questions if known.get(one.name) != ANSWERED]
    return sorted(open_, key=lambda one: turns.index(known.get(one.name, UNASKED)))


def run(
    questions: Sequence[Question], store: Store, out: Path, seconds: float, small: bool = False
) -> None:
    """Ask what is open and fits into the seconds of a call. Logs are in `out`/logs."""
    deadline = time.monotonic() + seconds - _RESERVE_S
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for question in order(questions, statuses(store.rows)):
        name, begin = question.name, time.monotonic()
        left = deadline - begin
        if left < (0 if small else question.needs_s / 2):
            print(f"{name}: no time left, next call", flush=True)
            continue
        limit = left if small else min(left, question.limit_s)
        print(f"{name}: {question.title} ({limit:.0f} s)", flush=True)
        row = {"kind": "asked", "question": name, "seconds": 0.0}
        # Should everything be killed.
        store.append({**row, "status": INTERRUPTED, "text": "the whole call ended"})
        process = EngineProcess(log := out / "logs" / f"{name}.log")
        try:
            process.call(ask, question.ask, out, small)
            process.answer(timeout_s=limit)
            status, text = ANSWERED, "" if question.page else log.read_text(errors="replace")
        except EngineError as error:
            text = str(error)
            status = INTERRUPTED if text.startswith("no answer after") else FAILED
        finally:
            process.close()
        text = "\n".join(FOLDER.sub("", text).strip().splitlines()[-_LINES:])
        row["seconds"] = round(time.monotonic() - begin, 1)
        store.append({**row, "status": status, "text": text})
        print(f"{name}: {status} after {row['seconds']:.0f} s", flush=True)


def page(rows: Sequence[Row], out: Path, questions: Sequence[Question] = QUESTIONS) -> str:
    """Markdown of all answers so far, from their files alone."""
    lines = ["# A quarter of an hour on a GPU", ""]
    for number, call in enumerate(row for row in rows if row["kind"] == "run"):
        own = call["provenance"]
        versions = ", ".join(f"{n} {own.get(n)}" for n in ("driver", "vllm", "torch", "triton"))
        where = f"`{own['command']}` at {str(own['commit'])[:7]}, {own['gpu']}, {versions}"
        lines.append(f"- Call {number}, {own['time']}: {where}")
    for question in questions:
        tries = [row for row in rows if row.get("question") == question.name]
        last = tries[-1] if tries else {"status": UNASKED, "text": ""}
        found = out / f"{question.name}.jsonl"
        lines += ["", f"## {question.title}", ""]
        lines.append(f"It decides {question.decides}. {last['status'].capitalize()}.")
        if question.page is not None and found.exists():
            lines += ["", question.page(read_rows(found))]
        if last["text"]:
            lines += ["", "```", last["text"], "```"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit status is 1 while a question has no answer."""
    parser, names = parser_of(benchmarks.gpu.__doc__), [question.name for question in QUESTIONS]
    parser.add_argument("--seconds", type=float, default=430, help="of this call (default 430)")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--small", action="store_true", help="the tiny pair, for the simulated GPU")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="folder of all answers")
    given = parser.parse_args(argv)
    questions = [question for question in QUESTIONS if question.name in given.only]
    out = given.out.resolve()
    path = out / "answers.jsonl"
    rows = read_rows(path) if path.exists() else []
    if given.list:
        for one in questions:
            print(f"{one.name:9} {one.needs_s:4.0f} s, at most {one.limit_s:.0f}: {one.title}")
            print(f"{'':9} decides {one.decides}; {statuses(rows).get(one.name, UNASKED)}")
        return 0
    if not given.page and order(questions, statuses(rows)):
        from benchmarks.ops.device import gpu_facts

        if (gpu := gpu_facts())["gpu"] is None:
            parser.error("no CUDA device here")
        source = provenance(command_line("benchmarks.gpu", argv or sys.argv[1:])) | gpu
        store = Store(path, {}, {"provenance": source})
        run(questions, store, out, given.seconds, given.small)
        rows = store.rows
    (out / "answers.md").write_text(page(rows, out))
    print(page(rows, out))
    return int(any(statuses(rows).get(one.name) != ANSWERED for one in questions))


if __name__ == "__main__":
    raise SystemExit(main())
