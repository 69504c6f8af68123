# SPDX-License-Identifier: Apache-2.0
"""Question `real`: a real chat model on real text, without and with copies of the context.

SmolLM2-135M widened to 4B's sizes: its function and its drafter's, at the cost of such a model.
"""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks import RESULTS
from benchmarks.gpu.quarter.adaptive import others
from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import (
    LOOKUP,
    folder_of,
    pair_engine,
    tell_turns,
    texts,
    with_lookup,
)
from benchmarks.harness.engine import Request
from benchmarks.harness.switched import ADAPTIVE, Switched
from benchmarks.replay.recording import load_recording

# Requests at a time -> prompts of each of the recording's ten sets.
_LOADS = {1: 2, 4: 4, 16: 8, 64: 16}
_FIXED = {1: "16", 4: "16", 16: "8", 64: "4"}
_LENGTH, _TOKENS, _GAMMA = 1024, 128, 7


def ask(job: Job) -> None:
    """T = 0 and 1 at each load, two rounds after one of few prompts that is not told."""
    loads, tokens = ({1: 1, 2: 1}, 8) if job.small else (_LOADS, _TOKENS)
    names = {f"{n} at a time, T={t}": (n, t) for t in (0, 1) for n in loads}
    if not job.lacks(*names):
        return
    folder = folder_of("smollm2-4B", job.small)
    ask_for = texts if job.small else recorded
    requests = {part: ask_for(loads[n], tokens, t) for part, (n, t) in names.items()}
    few = {f"warm-up, {part}": found[: 2 * names[part][0]] for part, found in requests.items()}
    length = 512 if job.small else _LENGTH
    engine = pair_engine(folder, job.small, max(loads), alive=4, length=length)
    if engine.kv_cache_bytes is not None:  # prompts are a third of the longest, on average
        engine = replace(engine, kv_cache_bytes=engine.kv_cache_bytes // 2)
    engines = {**others(engine, best=True, gamma=_GAMMA), LOOKUP: with_lookup(engine)}
    switched = Switched(engine, requests | few, engines)
    job.note("starts", **switched.start_s)
    for part in job.lacks(*names):
        at_once = names[part][0]
        modes = [*engines, "8" if job.small else _FIXED[at_once], ADAPTIVE]
        tell_turns(job, switched, part, at_once, modes, 2, f"warm-up, {part}")


def recorded(number: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """`number` prompts of each set of the recording in turn, again and again; seeded above T=0.

    Replies have a quarter to five quarters of `tokens`. If all had one length, those of plain
    decoding alone would end together, and its prompts would come in few steps.
    """
    lengths = random.Random(5)
    known = load_recording(RESULTS / "recordings" / "smollm2.npz")
    sets: dict[str, list[list[int]]] = {}
    begin = 0
    for domain, length in zip(known.domains, known.prompt_lens.tolist(), strict=True):
        sets.setdefault(domain, []).append(known.prompts[begin : begin + length].tolist())
        begin += length
    turns = [found[i % len(found)] for i in range(number) for found in sets.values()]
    return [
        Request(
            *(str(i), prompt, lengths.randint(tokens // 4, tokens * 5 // 4), temperature),
            seed=i if temperature else None,
            params={"ignore_eos": False},
        )
        for i, prompt in enumerate(turns)
    ]
