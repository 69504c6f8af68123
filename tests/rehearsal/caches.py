# SPDX-License-Identifier: Apache-2.0
"""Compile beforehand what the quarter of an hour on a GPU would compile there.

    python -m tests.rehearsal caches [--compile] [--only ENGINE]

Run it with a virtual environment like the GPU machine's (same Python, PyTorch, Triton; vLLM from
the kit) in which `setup.sh driver` has built the driver. Each engine starts on the fake driver with
random weights, in its real shape and without numbers; launches compile for sm_90. What is compiled
and what vLLM notes of its models goes to /tmp/bastion-gpu/cache, where `kit.sh` reads it on the
GPU machine. `--compile` starts engines with torch.compile, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HOME = Path("/tmp/bastion-gpu")
_CACHES = {
    "XDG_CACHE_HOME": "",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
_EAGER = {"compilation_config": {"mode": 0}}


def fill(arguments: list[str]) -> int:
    """Start every engine once; 0 if all did."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal caches", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--only", help="one of the engines that it prints, in this process")
    given = parser.parse_args(arguments)
    for name, below in _CACHES.items():
        os.environ[name] = str(HOME / "cache" / below)
    engines = _engines(given.compile)
    if given.only:
        _patch()
        engines[given.only]()
        sys.stdout.flush()
        os._exit(0)  # vLLM's own way out takes long
    failed = 0
    for name in engines:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "tests.rehearsal", "caches", *arguments, "--only", name]
        with (HOME / f"{name.replace(' ', '-')}.log").open("w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        failed += status != 0
        size = sum(p.stat().st_size for p in (HOME / "cache").rglob("*") if p.is_file()) / 1e6
        seconds = time.perf_counter() - begin
        print(f"{name}: status {status}, {seconds:.0f} s, {size:.0f} MB in all", flush=True)
    return int(failed > 0)


def _patch() -> None:
    """Nothing is timed, no compiler of CUDA is here, and models are inspected in this process."""
    from torch._inductor.runtime.benchmarking import benchmarker
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.layers import logits_processor
    from vllm.model_executor.models import registry

    Autotuner._bench = lambda tuner, *args, config, **meta: [1.0, 1.0, 1.0]
    benchmarker.benchmark_gpu = lambda *args, **kwargs: 1.0
    logits_processor._flashinfer_topk = lambda: None
    registry._run_in_subprocess = lambda look: look()


def _engines(compiled: bool) -> dict[str, Any]:
    from benchmarks.gpu.engines import folder_of
    from benchmarks.gpu.questions import ENGINES
    from benchmarks.widen import SHAPES, make_pair

    wide = HOME / "cache" / "vllm-bastion" / "pairs" / "4B"  # where the pair will be
    if not (wide / "target").exists():
        make_pair(SHAPES["4B"], wide, shard_bytes=None)
    found: dict[str, Any] = {}
    for engines in ENGINES.values():
        # SmolLM2 needs its weights; in 4B's sizes it runs the code of the pair above.
        folder = wide if "4B" in engines.shape else folder_of(engines.shape, small=False)
        for mode in engines.modes:
            engine = engines.engine(mode, False, folder)
            more = {**engine.more, "load_format": "dummy", **({} if compiled else _EAGER)}
            found[f"{engines.shape} {mode}"] = _start(replace(engine, more=more))
    return {**found, "ops": _launch_ops}


def _start(engine: Any) -> Any:
    def start() -> None:
        from vllm import LLM

        LLM(**engine.arguments())

    return start


def _launch_ops() -> None:
    """Every case of the ops once; only their kernels matter."""
    from benchmarks.ops.on_gpu import gpu_cases

    for entry in gpu_cases():
        try:
            entry.make().calls[0]()
        except Exception as error:
            print(f"{entry.name}: {type(error).__name__}: {error}", flush=True)
