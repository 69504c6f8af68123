# SPDX-License-Identifier: Apache-2.0
"""Question `experts`: a mixture of experts of eight layers, plain steps against the profile's."""

from __future__ import annotations

from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import dummy_engine, noise, tell_turns
from benchmarks.harness.switched import NEVER, Switched

_LOADS = (1, 16)


def ask(job: Job) -> None:
    """Steps that draft nothing, and trees of 16 nodes; the profile's time is beside each."""
    loads, tokens = ((1, 2), 6) if job.small else (_LOADS, 48)
    names = {f"{n} requests": n for n in loads}
    if not job.lacks(*names):
        return
    limits = {"max_num_seqs": max(loads), "max_model_len": 512, "gpu_memory_utilization": 0.5}
    if job.small:
        del limits["gpu_memory_utilization"]
    engine, _folder = dummy_engine("experts", job.small, **limits)
    switched = Switched(engine, {name: noise(n, tokens) for name, n in names.items()}, {})
    job.note("start", **switched.start_s)
    for name in job.lacks(*names):
        tell_turns(job, switched, name, names[name], (NEVER, "16"), 1)
