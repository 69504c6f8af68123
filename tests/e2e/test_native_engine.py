# SPDX-License-Identifier: Apache-2.0
"""A CPU host as users have it: no environment variables, no Triton back end.

The engines run as `LLM(...)` with vLLM's own worker processes. These are forked from a process that
has imported vLLM, or, without Triton, spawned as vLLM does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import run_python
from tests import interpreter
from tests.e2e.engines import DRAFTER, ROOT, TARGET, Runner
from vllm_bastion import plugin
from vllm_bastion.cpu import build

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available() or not build.is_cpu_build(), reason="for CPU hosts"
)
without_triton = pytest.mark.skipif(interpreter.has_cpu_backend(), reason="Triton has a back end")
slow, e2e = pytest.mark.slow, pytest.mark.e2e

_CODE = """
import json, multiprocessing, os, sys
import torch
from vllm import LLM, SamplingParams

def look(worker):
    runner = type(worker.model_runner)
    replacements = sys.modules.get("vllm_bastion.cpu.replacements")
    name = f"{runner.__module__}.{runner.__name__}"
    return name, replacements is not None, torch.get_num_threads()

def answer(arguments):
    llm = LLM(**arguments)
    prompts = ["The quick brown fox", "def fibonacci(n):", "12 + 30 ="]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    print("ANSWER" + json.dumps([llm.collective_rpc(look), tokens]), flush=True)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    first, *others = json.loads(ENGINES)
    if not others:
        answer(first)
    elif IN_ONE_PROCESS:
        for arguments in (first, *others):
            answer(arguments)
    else:
        from tests.e2e.offline import fork
        fork()
        for arguments in (first, *others):
            process = multiprocessing.get_context("fork").Process(target=answer, args=[arguments])
            process.start()
            process.join()
"""
_OURS = (
    "TRITON_INTERPRET",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "OMP_NUM_THREADS",
)


def run(
    runner: Runner, *engines: dict[str, Any], hide: Path | None = None, in_one: bool = False
) -> list[tuple[Any, Any]]:
    """What each engine's worker reports (model runner, replacements, threads), and its tokens.

    runner: only its cache folders are used.
    engines: arguments of `LLM`; a single engine runs in processes that vLLM spawns.
    hide: an empty folder; if given, Triton is hidden from all processes.
    in_one: one after the other in one process.
    """
    usual = {
        "model": TARGET, "dtype": "float32", "enforce_eager": True, "max_model_len": 128,
        "max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 26,
    }  # fmt: skip
    code = _CODE.replace("ENGINES", repr(json.dumps([usual | engine for engine in engines])))
    code = code.replace("IN_ONE_PROCESS", str(in_one))
    environment: dict[str, str | None] = dict.fromkeys(_OURS)
    environment |= runner.caches
    if in_one:
        code = f"import numba\n{code}"  # as an engine does
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if hide is not None:
        (hide / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
        paths = [str(hide), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    result = run_python(code, cwd=ROOT, **environment)
    lines = [line for line in result.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(lines) == len(engines), result.stderr[-4000:]
    speculating = [engine for engine in engines if "speculative_config" in engine]
    assert result.stdout.count("Bastion: DFlash") == len(speculating), result.stdout[-4000:]
    answers = [json.loads(line.removeprefix("ANSWER")) for line in lines]
    return [(looked[0], tokens) for looked, tokens in answers]


# A fixed budget: steps are timed in `test_serving.py`.
_KEYS = {"method": "bastion", "model": DRAFTER, "num_speculative_tokens": 16, "bastion_budget": 16}
TREE = {"speculative_config": _KEYS}


@e2e
@slow
@on_cpu
@without_triton
def test_bastion_uses_native_twins_and_leaves_plain_engines_alone(runner: Runner) -> None:
    first, second = run(runner, {}, TREE)
    (plain, plain_replacement, plain_threads), tokens = first
    (tree, tree_replacement, threads), tree_tokens = second
    assert plain == "vllm.v1.worker.cpu_model_runner.CPUModelRunner" and not plain_replacement
    assert tree == "vllm.v1.worker.cpu.model_runner.CPUModelRunner" and tree_replacement
    assert threads == plain_threads
    assert tree_tokens == tokens


@e2e
@slow
@on_cpu
@without_triton
def test_triton_need_not_be_installed(runner: Runner, tmp_path: Path) -> None:
    [((_, replacements, _), tokens)] = run(runner, TREE, hide=tmp_path)
    assert replacements
    assert tokens == run(runner, {})[0][1]


def test_vllms_scan_of_all_modules_gets_past_llvmlite() -> None:
    pytest.importorskip("numba")
    from llvmlite.binding import ffi
    from vllm.triton_utils import dispatcher

    plugin.register()
    ffi.lib._fntab.pop("__dict__", None)
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        dispatcher._rebind_kernels.__wrapped__([])  # vLLM's own
    ffi.lib._fntab.pop("__dict__", None)
    dispatcher._rebind_kernels([])


@e2e
@slow
@on_cpu
def test_engines_start_one_after_another_in_one_process(runner: Runner) -> None:
    """A process that has imported Numba, as an engine does, can start another engine."""
    off = _KEYS | {"bastion_budget": "adaptive"}
    adaptive = {"speculative_config": off}
    first, *others = (tokens for _, tokens in run(runner, adaptive, adaptive, {}, in_one=True))
    assert others == [first, first]
