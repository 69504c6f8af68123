# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.rehearsal host`: the host's time in a step, with launches that do nothing.

Trees, or n-gram drafts alone, are forced, with as many nodes in every step; see `forced`. Nothing
else may run on the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import time
from statistics import median
from typing import Any

from tests.rehearsal.cases import TINY
from tests.rehearsal.forced import Steps
from vllm_bastion.scheduler.gate import Arm

_WARM_UP, _STEPS, _LOADS = 30, 150, (1, 16, 64)
_DRAFTER = {"model": str(TINY / "drafter")}
_ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "dflash, 15 tokens": {"method": "dflash", "num_speculative_tokens": 15, **_DRAFTER},
    "bastion, adaptive": {"method": "bastion", "bastion_lookup": False, **_DRAFTER},
    "bastion, adaptive, lookup": {"method": "bastion", **_DRAFTER},
    "bastion, n-gram drafts alone": {"method": "bastion", **_DRAFTER},
}


def measure(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal host", description=__doc__)
    parser.add_argument("--only", choices=_ENGINES, help="in this process")
    parser.add_argument("--profile", type=int, default=0, help="functions to list, at 16 requests")
    given = parser.parse_args(arguments)
    if given.only:
        _run(
            _ENGINES[given.only],
            Steps(Arm.NGRAM if "alone" in given.only else Arm.TREE),
            given.profile,
        )
        sys.stdout.flush()
        os._exit(0)  # vLLM's own way out takes long
    failed = 0
    print(f"| host, ms a step | {' | '.join(f'{n} requests' for n in _LOADS)} |")
    print("|---" * (1 + len(_LOADS)) + "|", flush=True)
    for name in _ENGINES:
        command = [sys.executable, "-m", "tests.rehearsal", "host", "--only", name]
        done = subprocess.run(command, capture_output=True, text=True)
        times = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step_ms")]
        failed += len(times) != len(_LOADS)
        print(f"| {name} | {' | '.join(times) or done.stderr[-500:]} |", flush=True)
    return int(failed > 0)


def _run(speculative: dict[str, Any] | None, steps: Steps, listed: int) -> None:
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    steps.install()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(TINY / "target"),
            dtype="bfloat16",
            max_num_seqs=max(_LOADS),
            max_model_len=1024,
            gpu_memory_utilization=0.05,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            speculative_config=speculative,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, detokenize=False)
    for load in _LOADS:
        names = [f"{load}-{i}" for i in range(load)]
        for i, name in enumerate(names):
            prompt = {"prompt_token_ids": [5 + (7 * i + j) % 200 for j in range(24)]}
            engine.add_request(name, prompt, params)
        for _ in range(_WARM_UP):
            engine.step()
        profile = cProfile.Profile() if listed and load == 16 else None
        if profile is not None:
            profile.enable()
        times = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        if profile is not None:
            profile.disable()
            for order in ("cumulative", "tottime"):
                pstats.Stats(profile).sort_stats(order).print_stats(listed)
        print(f"step_ms {1e3 * median(times):.2f}", flush=True)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
