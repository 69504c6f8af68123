# SPDX-License-Identifier: Apache-2.0
"""Question `real`: a real chat model on real text, without and with copies of the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import RESULTS, TINY
from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import pair_engine, speculative, tell_turns, texts, with_lookup
from benchmarks.harness.engine import Request, UserEngine
from benchmarks.harness.switched import ADAPTIVE, PLAIN, Switched
from benchmarks.replay.recording import load_recording
from benchmarks.smollm2.target import pair_folder

LOOKUP = "adaptive, lookup"
# Requests at a time -> prompts of each of the recording's ten sets.
_LOADS = {1: 2, 16: 8, 64: 16}
_LENGTH, _TOKENS, _GAMMA = 1536, 128, 7


def engines(folder: Path, small: bool, most: int) -> dict[str, UserEngine]:
    """By mode, the engine whose budget is switched last."""
    drafter = folder / "drafter"
    ours = pair_engine(folder, small, most, alive=4, length=512 if small else _LENGTH)
    chain = speculative("dflash", drafter, _GAMMA)
    return {
        PLAIN: replace(ours, speculative=None),
        f"dflash {_GAMMA}": replace(ours, speculative=chain),
        LOOKUP: with_lookup(ours),
        ADAPTIVE: ours,
    }


def ask(job: Job) -> None:
    """T = 0 and 1 at each load, two rounds after one of few prompts that is not told."""
    loads, tokens = ({1: 1, 2: 1}, 8) if job.small else (_LOADS, _TOKENS)
    names = {f"{n} at a time, T={t}": (n, t) for t in (0, 1) for n in loads}
    if not job.lacks(*names):
        return
    folder = TINY if job.small else pair_folder()
    ask_for = texts if job.small else recorded
    requests = {part: ask_for(loads[n], tokens, t) for part, (n, t) in names.items()}
    few = {f"warm-up, {part}": found[: 2 * names[part][0]] for part, found in requests.items()}
    modes = engines(folder, job.small, max(loads))
    others = {mode: engine for mode, engine in modes.items() if mode != ADAPTIVE}
    switched = Switched(modes[ADAPTIVE], requests | few, others)
    job.note("starts", **switched.start_s)
    for part in job.lacks(*names):
        tell_turns(job, switched, part, names[part][0], list(modes), 2, f"warm-up, {part}")


def recorded(number: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """`number` prompts of each set of the recording in turn, again and again; seeded above T=0."""
    known = load_recording(RESULTS / "recordings" / "smollm2.npz")
    sets: dict[str, list[list[int]]] = {}
    begin = 0
    for domain, length in zip(known.domains, known.prompt_lens.tolist(), strict=True):
        sets.setdefault(domain, []).append(known.prompts[begin : begin + length].tolist())
        begin += length
    turns = [found[i % len(found)] for i in range(number) for found in sets.values()]
    return [
        Request(
            *(str(i), prompt, tokens, temperature, i if temperature else None),
            params={"ignore_eos": False},
        )
        for i, prompt in enumerate(turns)
    ]
