# SPDX-License-Identifier: Apache-2.0
"""Question `ops`: device ops that no run on a GPU has timed yet, each checked first."""

from __future__ import annotations

import os
from dataclasses import asdict

import torch

from benchmarks.gpu.bench_kernels import line
from benchmarks.gpu.engine_cases import engine_cases
from benchmarks.gpu.harness import measure_ceilings, run_entry
from benchmarks.gpu.quarter.job import Job

_REPLAYS = 50


def ask(job: Job) -> None:
    """A row for each case."""
    os.environ.pop("TRITON_INTERPRET", None)
    entries = [entry for entry in engine_cases(job.small) if entry.name not in job.known]
    if not entries:
        return
    replays = 2 if job.small else _REPLAYS
    ceilings = measure_ceilings(replays, 32 if job.small else 8192)
    job.note("ceilings", **asdict(ceilings))
    for entry in entries:
        torch.cuda.empty_cache()
        row = run_entry(entry, ceilings, replays)
        print(line(row), flush=True)
        job.note(entry.name, **{"op": entry.op, **row.as_json()})
