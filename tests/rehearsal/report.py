# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal showed: the table of docs/rehearsal.md, and what is wrong."""

from __future__ import annotations

import re
from datetime import date
from importlib import metadata
from typing import Any

from tests.rehearsal.cases import PROMPTS, ROOT, Case

PAGE = ROOT / "docs" / "rehearsal.md"
_BEGIN, _END = "<!-- rehearsal:begin -->", "<!-- rehearsal:end -->"
_COLUMNS = (
    "engine", "tokens equal plain", "faults", "launches outside graphs", "graphs (kernels inside)",
    "copies to / from / within the device", "waits: vLLM's + ours", "stream waits", "event records",
    "blocking copies, syncs, allocations",
)  # fmt: skip
_Results = dict[str, dict[str, Any]]


def blocking(steady: dict[str, float]) -> float:
    """Calls per step that a steady step must not have: all waits but for an event, allocations."""
    return sum(
        mean
        for name, mean in steady.items()
        if name == "alloc:device" or (name.startswith("sync:") and name != "sync:event")
    )


def problems(cases: list[Case], results: _Results) -> list[str]:
    """One line for everything that is wrong."""
    found = []
    for case in cases:
        result = results[case.name]
        if "failure" in result:
            found.append(f"{case.name}: it did not run to its end")
            continue
        found += [f"{case.name}: fault: {fault}" for fault in result["faults"]]
        found += [f"{case.name}: no numbers for {name}" for name in result["missing"]]
        found += [f"{case.name}: {error}" for error in result["errors"]]
        steady, plain = result["steady"], results[case.plain]
        if result["steady_steps"] < 1:
            found.append(f"{case.name}: no steady step")
        if result["tokens"] != plain.get("tokens"):
            found.append(f"{case.name}: other tokens than {case.plain}")
        if result.get("cached") != plain.get("cached"):
            found.append(f"{case.name}: {result['cached']} cached tokens, not {plain['cached']}")
        if case.long and not all(result["cached"]):
            found.append(f"{case.name}: a second turn found nothing in the cache")
        if case.takes_prompts and not result["in_graph"]:
            found.append(f"{case.name}: a prompt that joined was in no graph")
        if case.like_fresh and result["steps"] != plain.get("steps"):
            found.append(f"{case.name}: {result['steps']} steps, a fresh engine {plain['steps']}")
        if case.unlike is not None:
            usual = results["plain"].get("tokens", ())[: len(PROMPTS)]
            pairs = enumerate(zip(result["tokens"], usual))
            changed = tuple(i for i, (own, before) in pairs if own != before[: len(own)])
            if changed != case.unlike:
                found.append(f"{case.name}: changed the tokens of prompts {changed}")
        if steady["waits:ours"] > case.waits:
            places = ", ".join(result["waits"])
            found.append(f"{case.name}: {steady['waits:ours']:.1f} waits of ours a step ({places})")
        if blocking(steady) > case.blocks:
            found.append(f"{case.name}: it blocks or allocates in steady steps: {steady}")
        if steady.get("unimplemented"):
            found.append(f"{case.name}: it calls what the fake driver lacks")
    return found


def table(cases: list[Case], results: _Results) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for case in cases:
        result = results[case.name]
        if "failure" in result:
            lines.append(f"| {case.title} | failed |" + " |" * (len(_COLUMNS) - 2))
            continue
        same = result["tokens"] == results[case.plain].get("tokens")
        cells = [case.title, "yes" if same else "NO", str(len(result["faults"]))]
        lines.append(f"| {' | '.join([*cells, *_counts(result['steady'])])} |")
    return "\n".join(lines)


def _counts(steady: dict[str, float]) -> list[str]:
    def mean(name: str) -> str:
        return f"{steady.get(name, 0):.1f}".removesuffix(".0")

    copies = " / ".join(mean(f"memcpy:{way}") for way in ("HtoD", "DtoH", "DtoD"))
    return [
        mean("launch"),
        f"{mean('graph:launch')} ({mean('graph:kernels')})",
        copies,
        f"{mean('waits:vllm')} + {mean('waits:ours')}",
        mean("stream_wait_event"),
        mean("event:record"),
        f"{blocking(steady):.1f}".removesuffix(".0"),
    ]


def write(text: str) -> None:
    """Put the table into docs/rehearsal.md, with what it was made with: vLLM 0.32 only."""
    if not metadata.version("vllm").startswith("0.32."):
        return
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("vllm", "torch", "triton"))
    block = f"{_BEGIN}\n{text}\n\n{date.today()}, {versions}\n{_END}"
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: block, page, flags=re.DOTALL))
