# SPDX-License-Identifier: Apache-2.0
"""The page of all answers so far, from their file alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.quarter.questions import QUESTIONS
from benchmarks.gpu.quarter.store import ANSWERED, UNASKED, Answers
from benchmarks.harness.switched import ADAPTIVE, NEVER, PLAIN
from benchmarks.provenance import FOLDER

_Row = dict[str, Any]


def page(answers: Answers) -> str:
    """Markdown."""
    lines = ["# A quarter of an hour on a GPU", ""]
    lines += [_call(number, call) for number, call in enumerate(answers.calls)]
    for question in QUESTIONS:
        entry = answers.questions.get(question.name, {})
        status = answers.status(question.name)
        lines += ["", f"## {question.title}", "", f"It decides {question.decides}."]
        if status != UNASKED:
            lines.append(f"Status: {status}, {entry['seconds']:.0f} s.")
        else:
            lines.append("Not asked yet.")
        if status not in (ANSWERED, UNASKED):
            lines += ["", "```", *str(entry["error"]).strip().splitlines()[-6:], "```"]
        if rows := entry.get("rows"):
            lines += ["", *_TABLES[question.name](rows)]
            calls = sorted({row["call"] for row in rows})
            if len(calls) > 1:
                lines += ["", f"Its rows are of the calls {', '.join(map(str, calls))}."]
    return "\n".join(lines) + "\n"


def _call(number: int, call: _Row) -> str:
    commit = str(call.get("commit"))[:7]
    versions = ", ".join(
        f"{name} {call[name]}" for name in ("vllm", "torch", "triton") if name in call
    )
    return (
        f"- Call {number}, {call['time']}: `{call['command']}` at {commit}, {call['gpu']}, driver "
        f"{call.get('driver')}, {versions}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; numbers get three digits."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _tests(rows: Sequence[_Row]) -> list[str]:
    passed = sum(row["outcome"] == "passed" for row in rows)
    lines = [f"{passed} of {len(rows)} tests passed."]
    for row in rows:
        if row["outcome"] != "passed":
            lines.append(f"- {row['part']}: {row['outcome']} {_reason(row['text'])}")
    return lines


def _reason(text: str) -> str:
    """The last line that names an error, without folders, else the last one."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return FOLDER.sub("", (errors or lines)[-1])


def _with(rows: Sequence[_Row], key: str) -> list[_Row]:
    return [row for row in rows if key in row]


def ratios(blocks: Sequence[_Row], base: str) -> dict[str, float]:
    """Mode -> base's time over its own, the median over the rounds."""
    times: dict[str, list[float]] = {}
    for block in blocks:
        times.setdefault(block["mode"], []).append(block["seconds"])
    return {
        mode: median(a / b for a, b in zip(times[base], own, strict=True))
        for mode, own in times.items()
    }


def _speeds(rows: Sequence[_Row]) -> list[str]:
    """Budgets of one engine, beside other engines."""
    found = []
    for row in _with(rows, "blocks"):
        blocks = row["blocks"]
        gains = ratios(blocks, PLAIN)
        fixed = [mode for mode in gains if mode.isdigit()]
        for mode, gain in gains.items():
            own = [block for block in blocks if block["mode"] == mode]
            forwards = sum(block["forwards"] for block in own)
            beside = None
            if mode == ADAPTIVE and fixed:
                best = max(fixed, key=lambda name: gains[name])
                beside = f"{ratios(blocks, best)[mode]:.3f} of N = {best}"
            found.append(
                (
                    row["part"],
                    f"N = {mode}" if mode.isdigit() else mode,
                    f"{gain:.2f}x",
                    sum(block["emitted"] for block in own) / max(1, forwards),
                    sum(block["nodes"] for block in own) / max(1, forwards),
                    1e3 * sum(b["seconds"] for b in own) / sum(b["steps"] for b in own),
                    *(own[0].get(kind) for kind in ("steps", "prompt_steps", "idle_steps")),
                    f"{own[0]['equal']}",
                    beside,
                )
            )
    head = (
        "",
        "mode",
        "of plain",
        "tau",
        "nodes",
        "ms a step",
        "steps",
        "with prompts",
        "idle",
        "replies equal plain's",
        "over the best fixed",
    )
    return [*table(head, found), "", *_starts(rows), "", *_steps(rows)]


def _steps(rows: Sequence[_Row]) -> list[str]:
    """Timed steps of each number of requests and rows, beside the profile's."""
    sums: dict[tuple[int, int, int], list[tuple[int, float, float]]] = {}
    for row in _with(rows, "blocks"):
        for block in row["blocks"]:
            for reqs, size, verified, number, measured, profile in block["timed"]:
                key = int(reqs), int(size), int(verified)
                sums.setdefault(key, []).append((int(number), measured, profile))
    found = []
    for (reqs, size, verified), parts in sorted(sums.items()):
        count = sum(part[0] for part in parts)
        measured, profile = (sum(p[0] * p[i] for p in parts) / count for i in (1, 2))
        kind = "trees" if verified else "plain"
        found.append((reqs, size, kind, count, measured, profile, measured / profile))
    head = ("requests", "rows", "", "steps", "ms", "the profile's", "ratio")
    return table(head, found) if found else []


def _starts(rows: Sequence[_Row]) -> list[str]:
    starts = [row for row in rows if row["part"] in ("start", "starts")]
    if not starts:
        return []
    values = {name: value for name, value in starts[-1].items() if name not in ("part", "call")}
    return [f"Start: {', '.join(f'{name} {_cell(value)}' for name, value in values.items())}."]


def _start_and_steps(rows: Sequence[_Row]) -> list[str]:
    found = []
    for row in _with(rows, "blocks"):
        for block in row["blocks"]:
            mode = block["mode"]
            name = {NEVER: "no drafts", ADAPTIVE: "adaptive"}.get(mode, f"N = {mode}")
            found.append(
                (row["part"], name, block["steps"], 1e3 * block["seconds"] / block["steps"])
            )
    lines = [*_starts(rows), "", *table(("", "", "steps", "ms a step, prompts included"), found)]
    return [*lines, "", *_steps(rows)]


def _ops(rows: Sequence[_Row]) -> list[str]:
    found = []
    for row in rows:
        if row["part"] == "ceilings":
            continue
        timing, judge = row.get("timing"), row.get("judge_timing")
        note = f"{row['failed']} failed: {row['error']}" if row.get("failed") else row.get("judge")
        found.append(
            (
                row["part"],
                timing and timing["median"],
                judge and judge["median"],
                timing and judge and timing["median"] / judge["median"],
                note,
            )
        )
    return table(("", "us", "FlashAttention 3, us", "ratio", ""), found)


def _drafters(rows: Sequence[_Row]) -> list[str]:
    names = ("tau", "draft_ms", "step_ms", "ms_a_token")
    found = [
        (row["part"], kind, *(values[name] for name in names))
        for row in rows
        for kind, values in row.items()
        if isinstance(values, dict)
    ]
    return table(("", "drafter", "tau", "draft, ms", "step, ms", "ms a token"), found)


_TABLES: dict[str, Callable[[Sequence[_Row]], list[str]]] = {
    "tokens": _tests,
    "adaptive": _speeds,
    "real": _speeds,
    "defaults": _start_and_steps,
    "experts": _start_and_steps,
    "host": _speeds,
    "ops": _ops,
    "drafter": _drafters,
}
