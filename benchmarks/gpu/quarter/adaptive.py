# SPDX-License-Identifier: Apache-2.0
"""Question `adaptive`: budgets switched in one engine, beside plain decoding and the best chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import folder_of, pair_engine, speculative, tell_turns, texts
from benchmarks.harness.engine import GAMMA, UserEngine
from benchmarks.harness.switched import ADAPTIVE, PLAIN, Switched


def _chain(gamma: int, best: bool) -> str:
    return f"dflash {gamma}" + (", adaptive verification" if best else "")


BEST_CHAIN = _chain(GAMMA, best=True)
# Requests at a time -> prompts: at least twice as many as decode together.
_LOADS = {1: 6, 4: 12, 16: 48, 64: 128}
# Of which the largest still fits a CUDA graph.
_FIXED = {1: ("16", "64"), 4: ("16", "64"), 16: ("8", "16"), 64: ("4",)}


def others(engine: UserEngine, *, best: bool, gamma: int = GAMMA) -> dict[str, UserEngine]:
    """Plain decoding and vLLM's chain, on the settings of an engine.

    best: whether vLLM sizes the chain by its confidence.
    """
    drafter = engine.speculative["model"]
    keys: dict[str, Any] = {"enable_adaptive_verification": True} if best else {}
    chain = replace(engine, speculative=speculative("dflash", drafter, gamma, **keys))
    return {PLAIN: replace(engine, speculative=None), _chain(gamma, best): chain}


def ask(job: Job) -> None:
    """T = 0 and 1 at each load: all modes, two rounds after one that is not told."""
    loads, tokens = ({1: 1, 2: 2}, 8) if job.small else (_LOADS, 64)
    names = {f"{n} at a time, T={t}": (n, t) for t in (0, 1) for n in loads}
    if not job.lacks(*names):
        return
    folder = folder_of("4B", job.small)
    engine = pair_engine(folder, job.small, most=max(loads), alive=3, length=384)
    requests = {part: texts(loads[n], tokens, t) for part, (n, t) in names.items()}
    switched = Switched(engine, requests, others(engine, best=True))
    job.note("starts", **switched.start_s)
    for part in job.lacks(*names):
        fixed = ("8",) if job.small else _FIXED[names[part][0]]
        modes = [PLAIN, BEST_CHAIN, *fixed, ADAPTIVE]
        tell_turns(job, switched, part, names[part][0], modes, 2)
