# SPDX-License-Identifier: Apache-2.0
"""What device and host do in steady steps of the 4B shape, by PyTorch's profiler."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import TINY
from benchmarks.e2e.store import Row, Store
from benchmarks.harness.engine import Request
from benchmarks.harness.steps import engine_core, model_runner
from benchmarks.pairs import pair_folder
from benchmarks.prompts import load_jsonl

MODES = ("plain", "dflash 15 adaptive", "bastion budget=16 lookup=false")
_LOADS, _LENGTH = (1, 4, 16), 1024
WARM_UP = 20
_JOINS_EVERY = 3
# Parts of a step on the host. A gap of the device belongs to the innermost that runs then.
_SCHEDULER = ("schedule", "update_from_output")
_RUNNER = ("prepare_inputs", "prepare_attn", "execute_model", "sample", "sample_tokens")
_WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_KERNELS, _NAME_CHARACTERS = 12, 70


class Event(NamedTuple):
    """Something that the profiler saw, in nanoseconds."""

    name: str
    begin: int
    end: int
    on_device: bool


def answer(out: Path, small: bool) -> None:
    """Steady steps of each mode at each load, without and with prompts that join.

    Each part is appended to `out`/trace.jsonl at once; what it has is not measured again.
    """
    loads, steps, tokens = ((1, 2), 4, 200) if small else (_LOADS, 30, 700)
    parts = {
        f"{mode}, {n} requests{', prompts join' * joins}": (mode, n, joins)
        for mode in MODES
        for n in loads
        for joins in (False, True)
    }
    store = Store(out / "trace.jsonl", {}, {})
    known = {row["part"] for row in store.of_kind("part")}
    if not (missing := [part for part in parts if part not in known]):
        return
    engines = _start(small, max(loads), store)
    texts = [prompt.turns[0] for prompt in load_jsonl(TINY / "prompts.jsonl")]
    for part in missing:
        mode, n, joins = parts[part]
        # The texts of a domain stand together.
        requests = [Request(str(i), texts[31 * i % len(texts)], tokens) for i in range(n)]
        prompts = _noise(8, 60 if small else 300) if joins else []
        found = steady_steps(engines[mode], requests, prompts, steps, on_device=not small)
        store.append({"kind": "part", "part": part, **found})


def _start(small: bool, most: int, store: Store) -> dict[str, Any]:
    """Each mode's engine, side by side in this process."""
    from benchmarks.e2e.methods import ENVIRONMENT, Target, gpu_share, method_of

    os.environ |= {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    folder, found = TINY if small else pair_folder("4B"), {}
    what = Target(str(folder / "target"), str(folder / "drafter"))
    own: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": most, "max_model_len": _LENGTH}
    own |= {"max_num_batched_tokens": 8192, **gpu_share(what, len(MODES), most, _LENGTH)}
    if small:
        own |= {"dtype": "float16", "max_num_batched_tokens": 2048, "memory": 0.02}
        own["cudagraphs"] = "FULL_DECODE_ONLY"
    for mode in MODES:
        words = mode + " nodes=31" * (small and mode.startswith("bastion"))
        begin = time.perf_counter()
        found[mode] = LLM(
            **method_of(words, what).engine(what.target, cpu=False, **own).arguments()
        )
        seconds = time.perf_counter() - begin
        store.append({"kind": "start", "method": mode, "seconds": seconds})
        _name_parts(found[mode])
    return found


def _noise(number: int, length: int) -> list[Request]:
    """Requests for two tokens whose prompts all differ."""
    prompts = [[(31 * r + 7 * i) % 1000 + 2 for i in range(length)] for r in range(number)]
    return [Request(str(r), ids, max_tokens=2) for r, ids in enumerate(prompts)]


def page(rows: Sequence[Row]) -> str:
    """A table of the parts, and how long the engines took to start."""
    parts = [{k: v for k, v in row.items() if k != "kind"} for row in rows if "part" in row]
    lines = [f"| {' | '.join(parts[0])} |", "|---" * len(parts[0]) + "|"] if parts else []
    lines += [f"| {' | '.join(map(_cell, one.values()))} |" for one in parts]
    starts = [f"{row['method']} {_cell(row['seconds'])} s" for row in rows if "seconds" in row]
    return "\n".join([*lines, "", f"Starts: {'; '.join(starts)}."])


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(own)}" for name, own in value.items())
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "/").split())


def _name_parts(llm: Any) -> None:
    """Name parts of the engine's steps in what the profiler records."""
    scheduler, runner = engine_core(llm).scheduler, model_runner(llm)
    speculator = getattr(runner, "speculator", None)
    parts = [(scheduler, name) for name in _SCHEDULER] + [(runner, name) for name in _RUNNER]
    for owner, name in [*parts, (speculator, "propose")]:
        if hasattr(owner, name):
            setattr(owner, name, _named(getattr(owner, name), name))


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    from torch.profiler import record_function

    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return named


def steady_steps(
    llm: Any,
    requests: Sequence[Request],
    prompts: Sequence[Request],
    steps: int,
    *,
    on_device: bool = True,
) -> dict[str, Any]:
    """Decode requests and look at some steps, first timed, then profiled.

    Args:
        prompts: of requests that join, one every third step; if there are none, no step has one.
        on_device: whether the profiler sees the device, too.
    """
    engine, done = llm.llm_engine, 0
    names = [f"steady-{time.monotonic_ns()}-{i}" for i in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        engine.add_request(name, request.vllm_prompt(), request.sampling_params())
    for _ in range(WARM_UP):
        engine.step()

    def step() -> None:
        nonlocal done
        if prompts and done % _JOINS_EVERY == 0:
            one, name = prompts[done // _JOINS_EVERY % len(prompts)], f"{names[0]}-joins-{done}"
            engine.add_request(name, one.vllm_prompt(), one.sampling_params())
        engine.step()
        done += 1

    begin = time.perf_counter()
    for _ in range(steps):
        step()
    milliseconds = 1e3 * (time.perf_counter() - begin) / steps
    found = summary(profiled(step, steps, on_device), steps)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {"ms": milliseconds, **found}


def profiled(step: Callable[[], None], steps: int, on_device: bool) -> list[Event]:
    """What the profiler sees of some steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    with profile(activities=activities) as watched:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    named = {*_SCHEDULER, *_RUNNER, "propose"}  # these are shown on the device, too
    return [
        Event(one.name(), one.start_ns(), one.start_ns() + one.duration_ns(), device)
        for one in watched.profiler.kineto_results.events()
        if not (device := one.device_type() == DeviceType.CUDA) or one.name() not in named
    ]


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """The device's busy share, its gaps by part of the host, and its kernels by time; ms a step.

    `launches` and `waits` are the host's calls a step.
    """
    per_step = 1e-6 / steps
    host = [one for one in events if not one.on_device]
    device = sorted((one for one in events if one.on_device), key=lambda one: one.begin)
    parts = sorted(
        (one for one in host if one.name in {*_SCHEDULER, *_RUNNER, "propose", *_WAITS}),
        key=lambda one: one.begin,
    )
    begins, gaps, busy, end = [one.begin for one in parts], Counter[str](), 0, 0
    for one in device:
        if end and one.begin > end:
            gaps[_part_at((one.begin + end) // 2, parts, begins)] += one.begin - end
        busy += max(0, one.end - max(end, one.begin))
        end = max(end, one.end)
    kernels = Counter[str]()
    for one in device:
        kernels[one.name[:_NAME_CHARACTERS]] += one.end - one.begin
    span = end - device[0].begin if device else 0
    return {
        "profiled_ms": span * per_step,
        "busy": busy / span if span else None,
        "gaps": {name: ns * per_step for name, ns in gaps.most_common()},
        "kernels": {name: ns * per_step for name, ns in kernels.most_common(_KERNELS)},
        "launches": sum(one.name.startswith(_LAUNCHES) for one in host) / steps,
        "waits": sum(one.name in _WAITS for one in host) / steps,
    }


def _part_at(moment: int, parts: Sequence[Event], begins: Sequence[int]) -> str:
    """The innermost part that runs then: of those that have begun and not ended, the last."""
    for one in reversed(parts[: bisect_right(begins, moment)]):
        if one.end > moment:
            return one.name
    return "elsewhere"
