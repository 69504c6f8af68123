# SPDX-License-Identifier: Apache-2.0
"""Question `host`: the tiny pair, whose steps are nearly all host time."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import TINY
from benchmarks.gpu.quarter.adaptive import others
from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import LOOKUP, SMALL, pair_engine, tell_turns, texts, with_lookup
from benchmarks.harness.switched import ADAPTIVE, Switched

_LOADS = {1: 12, 16: 64}


def ask(job: Job) -> None:
    """Plain, vLLM's chain of 15, adaptive without and with lookup.

    Without torch.compile, whose start would cost a minute.
    """
    loads, tokens = ({1: 1, 2: 2}, 6) if job.small else (_LOADS, 64)
    names = {f"{n} at a time": n for n in loads}
    if not job.lacks(*names):
        return
    engine = pair_engine(TINY, job.small, most=max(loads), alive=4, length=384)
    engine = replace(engine, more=SMALL["more"])
    requests = {name: texts(loads[n], tokens) for name, n in names.items()}
    engines = {**others(engine, best=False), LOOKUP: with_lookup(engine)}
    switched = Switched(engine, requests, engines)
    job.note("starts", **switched.start_s)
    modes = [*engines, ADAPTIVE]
    for name in job.lacks(*names):
        tell_turns(job, switched, name, names[name], modes, 3)
