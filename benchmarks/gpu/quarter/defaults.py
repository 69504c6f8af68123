# SPDX-License-Identifier: Apache-2.0
"""Question `defaults`: an 8B shape with random weights and all of vLLM's defaults."""

from __future__ import annotations

import time
from functools import wraps
from typing import Any

import torch

from benchmarks.gpu.quarter.job import Job
from benchmarks.gpu.quarter.shapes import dummy_engine, noise, tell_turns
from benchmarks.harness.switched import ADAPTIVE, NEVER, Switched

_LOADS = (1, 16, 32, 33, 64)
_GIB = 1 << 30


def ask(job: Job) -> None:
    """Memory and seconds of the start, then steps: plain, trees of 15 nodes, as a user has it.

    A random drafter is never right, so that each step emits a token, and the gate closes.
    """
    loads, tokens = ((1, 3), 6) if job.small else (_LOADS, 24)
    names = {f"{n} requests": n for n in loads}
    if not job.lacks(*names):
        return
    peak = _watch_warm_up()
    engine, _folder = dummy_engine("8B", job.small)
    switched = Switched(engine, {name: noise(n, tokens) for name, n in names.items()}, {})
    job.note("start", **_memory(switched.core, peak), seconds=switched.start_s[ADAPTIVE])
    for name in job.lacks(*names):
        tell_turns(job, switched, name, names[name], (NEVER, "15", ADAPTIVE), 1)


def _watch_warm_up() -> dict[str, float]:
    """GiB before the warm-up and at its peak; GiB and seconds of graphs. Filled in by a start."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    found: dict[str, float] = {}
    warm_up = Worker.compile_or_warm_up_model

    @wraps(warm_up)  # the hooks compare its signature
    def watched(self: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        found["before_gib"] = torch.cuda.memory_allocated() / _GIB
        result = warm_up(self)
        found["peak_gib"] = torch.cuda.max_memory_reserved() / _GIB
        return result

    capture = GPUModelRunner.capture_model

    @wraps(capture)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        size = capture(self, *args, **kwargs)
        # The last call's. In an earlier one vLLM captures a few graphs to estimate their memory.
        found.update(graphs_gib=size / _GIB, graphs_s=time.perf_counter() - begin)
        return size

    GPUModelRunner.capture_model = captured
    Worker.compile_or_warm_up_model = watched
    return found


def _memory(core: Any, peak: dict[str, float]) -> dict[str, float]:
    config, scheduler = core.vllm_config, core.scheduler
    free, whole = torch.cuda.mem_get_info()
    tensors = scheduler.kv_cache_config.kv_cache_tensors
    return {
        **peak,
        "kv_gib": sum(tensor.size for tensor in tensors) / _GIB,
        "free_gib": free / _GIB,
        "total_gib": whole / _GIB,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "nodes": config.speculative_config.num_speculative_tokens,
    }
