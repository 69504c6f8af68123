# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.rehearsal compiles`: kernels of ours that an engine compiles while it serves.

A kernel that is compiled for the first time in a step holds that step up for a second. So the
warm-up must have launched every kernel, in every variant that a step uses. Launches do nothing
here, but each compiles its kernel for an H100. Every engine runs steps with trees, with n-gram
drafts alone and with neither, and requests that need every kind of processing. Drafters are
DFlash's: others would have FlashInfer compile its top-k for minutes.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from typing import Any

from tests.rehearsal import environment
from tests.rehearsal.cases import TINY
from tests.rehearsal.forced import KINDS, Steps

_FOUND = "compiled"
_ENGINES: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "piecewise": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "exact timing, without graphs": {
        "speculative_config": {"bastion_budget_timing": "exact"},
        "enforce_eager": True,
    },
    "fixed budget": {"speculative_config": {"bastion_budget": 16}},
    "hybrid": {"pair": TINY / "hybrid", "additional_config": {"gdn_prefill_backend": "triton"}},
    "hybrid, no prefix caching": {
        "pair": TINY / "hybrid",
        "additional_config": {"gdn_prefill_backend": "triton"},
        "enable_prefix_caching": False,
    },
}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 1},
    {"temperature": 0.0, "logprobs": 2},
    {
        "temperature": 0.0,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    {"temperature": 0.0, "bad_words": ["a b", "c"], "logit_bias": {7: 2.0}, "min_tokens": 3},
)


def report(arguments: list[str]) -> int:
    """Print what each engine compiles; 0 if none compiles a kernel of ours."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal compiles", description=__doc__)
    parser.add_argument("--only", choices=_ENGINES, help="in this process")
    given = parser.parse_args(arguments)
    if given.only:
        environment.break_graphs()
        _run(dict(_ENGINES[given.only]))
        sys.stdout.flush()
        os._exit(0)  # vLLM's own way out takes long
    problems = check()
    print("\n".join(problems) or "no kernel of ours is compiled while serving")
    return int(bool(problems))


def check() -> list[str]:
    """One line for each kernel of ours that an engine compiles while it serves, or that fails."""
    problems = []
    for name in _ENGINES:
        command = [sys.executable, "-m", "tests.rehearsal", "compiles", "--only", name]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if "served" not in lines:
            problems.append(f"compiles, {name}: {done.stderr[-2000:]}")
        kernels = [line.split() for line in lines if line.startswith(f"{_FOUND} ")]
        ours = _kernels()
        problems += [
            f"compiles, {name}: {kernel} in a step of {kind}"
            for _, kernel, kind in kernels
            if kernel in ours
        ]
    return problems


def _kernels() -> set[str]:
    """Names of all kernels of the ops package."""
    from triton.runtime.jit import JITFunction

    import bastion_kernels

    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(bastion_kernels.__path__, "bastion_kernels.")
        if not module.name.startswith("bastion_kernels.cpu")
    ]
    found = (value for module in modules for value in vars(module).values())
    return {value.__name__ for value in found if isinstance(value, JITFunction)}


def _run(arguments: dict[str, Any]) -> None:
    from vllm import EngineArgs, SamplingParams
    from vllm.utils import jit_monitor
    from vllm.v1.engine.llm_engine import LLMEngine

    steps = Steps()
    steps.install()
    pair, keys = arguments.pop("pair", TINY), arguments.pop("speculative_config", {})
    graphs = arguments.pop("cudagraph_mode", "FULL_DECODE_ONLY")
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(pair / "target"),
            dtype="bfloat16",
            max_num_seqs=32,
            max_model_len=1024,
            gpu_memory_utilization=0.05,
            disable_log_stats=False,
            compilation_config={"mode": 0, "cudagraph_mode": graphs},
            speculative_config={"method": "bastion", "model": str(pair / "drafter"), **keys},
            **arguments,
        )
    )

    def compiled(*, fn_name: str, **event: Any) -> None:
        print(_FOUND, fn_name, steps.kind.name, flush=True)

    jit_monitor._handle_jit_event = compiled
    always = {"max_tokens": 900, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**always, **kind) for kind in _KINDS]
    for load in (1, 3, 16):
        for sampling in range(len(params)):
            names = [f"{load}-{sampling}-{i}" for i in range(load)]
            for i, name in enumerate(names):
                # the first request alone, and a prompt beside decoding requests
                prompt = {"prompt_token_ids": [5 + (7 * i + j) % 200 for j in range(24 + i)]}
                engine.add_request(name, prompt, params[(sampling + i) % len(params)])
                for kind in KINDS if i in (0, load - 1) else KINDS[:1]:
                    steps.kind = kind
                    engine.step()
            for kind in (*KINDS, *KINDS[::-1]):
                steps.kind = kind
                for _ in range(5):
                    engine.step()
            engine.abort_request(names)
            while engine.has_unfinished_requests():
                engine.step()
    print("served", flush=True)
