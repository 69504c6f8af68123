# SPDX-License-Identifier: Apache-2.0
"""Run engine configurations, each in a process of its own, for the end-to-end tests.

    plain = Engine(max_num_seqs=4)
    tree = plain.with_bastion(nodes=16)
    first, second = runner.all([plain, tree], [batch])

Processes are forked from a server that has imported vLLM (`preload`); on a GPU they are spawned.
Two run at a time (four on a GPU), or one per process of pytest-xdist. A configuration runs once in
a session, even if several tests or xdist processes ask for it.

On a GPU, engines use bf16, FlashAttention and FULL graphs, so rounding decides more often which of
two tokens is the best: see `compare.NEAR_TIE`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bastion_kernels.cpu.cache import root as cache_dir
from benchmarks.harness.process import EngineProcess, changed_environment
from tests.e2e.costs import USUAL, Costs
from tests.e2e.worker import work

ROOT = Path(__file__).resolve().parents[2]
PAIR = Path(os.environ.get("VLLM_BASTION_TEST_PAIR", ROOT / "benchmarks" / "tiny"))
TARGET, DRAFTER = str(PAIR / "target"), str(PAIR / "drafter")
GAMMA = 15
ON_GPU = torch.cuda.is_available()

_ON_CPU = {
    # Plain decoding uses Model Runner V2 as well, which has the same seeded draws as bastion. Only
    # the tests' own process and vLLM's own methods use Triton's interpreter.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "0",
    "OMP_NUM_THREADS": "1",
    "NUMBA_BOUNDSCHECK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    **({} if ON_GPU else _ON_CPU),
}
_INTERPRETED = {"TRITON_INTERPRET": "1"}
# Compiled kernels and FULL graphs; a model this small is not worth torch.compile's time.
_GPU_ARGUMENTS = {
    "dtype": "bfloat16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.15,
    # Measuring free memory fails while another engine's process is freeing its own.
    "kv_cache_memory_bytes": 1 << 28,
}

_PRELOADED = ["tests.e2e.preload"]
_TIMEOUT_S, _EXIT_S = 3600, 60


def caches(folder: Path) -> dict[str, str]:
    """Environment variables that put everything engines compile into `folder`.

    Except what PyTorch finds out about the compiler's instruction sets, which it keeps under a
    digest: vLLM stores a model's code under VLLM_CACHE_ROOT, so each session compiles that anew.
    PyTorch believes what the CPU says of AVX; otherwise it compiles and loads a program for each.
    """
    names = ("VLLM_BASTION_CACHE", "VLLM_CACHE_ROOT")
    own = {name: str(folder / name.lower()) for name in names}
    isas = str(cache_dir() / "tests" / "inductor")
    return own | {"TORCHINDUCTOR_CACHE_DIR": isas, "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@dataclass(frozen=True)
class Engine:
    """Settings of an engine; the defaults suit two cores and four requests."""

    max_num_seqs: int = 4
    max_model_len: int = 320
    num_blocks: int = 96
    async_scheduling: bool = False
    # Without torch.compile.
    eager: bool = False
    # `speculative_config`; empty for plain decoding.
    speculative: dict[str, Any] = field(default_factory=dict)
    # Step costs with an adaptive budget; None: measured.
    costs: Costs | None = None
    # Further arguments of `LLM`.
    extra: dict[str, Any] = field(default_factory=dict)

    def with_bastion(
        self,
        nodes: int,
        budget: int | str = "adaptive",
        costs: Costs | None = None if ON_GPU else USUAL,
        **keys: Any,
    ) -> Engine:
        """The same engine with method "bastion"; `keys` are given without their `bastion_`."""
        own = {key if key == "model" else f"bastion_{key}": value for key, value in keys.items()}
        engine = self.with_method("bastion", nodes, bastion_budget=budget, **own)
        return replace(engine, costs=costs if budget == "adaptive" else None)

    def with_method(self, method: str, tokens: int, **keys: Any) -> Engine:
        given = {"method": method, "model": DRAFTER, "num_speculative_tokens": tokens, **keys}
        return replace(self, speculative=given, costs=None)

    def with_eager(self) -> Engine:
        """The same engine, not compiled."""
        return replace(self, eager=True)

    def with_async(self, on: bool = True) -> Engine:
        return replace(self, async_scheduling=on)

    def of(self, **arguments: Any) -> Engine:
        """The same engine with further arguments of `LLM`."""
        return replace(self, extra=self.extra | arguments)

    def arguments(self) -> dict[str, Any]:
        return {
            "model": TARGET,
            "dtype": "float32",
            "enforce_eager": self.eager,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 128,
            "block_size": 32,
            "num_gpu_blocks_override": self.num_blocks,
            "async_scheduling": self.async_scheduling,
            # Async scheduling sets it. It has no effect on a single rank, but is part of the
            # compilation cache's key, so both schedulers share compiled code with it.
            "disable_nccl_for_dp_synchronization": True,
            "disable_log_stats": False,
            # A model this small would pad JSON with blanks up to max_tokens.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            **(_GPU_ARGUMENTS if ON_GPU else {}),
            **self.extra,
            **({"speculative_config": dict(self.speculative)} if self.speculative else {}),
        }


@dataclass
class Batch:
    """Requests decoded together, see `Session.run`; `case` names them in the result table."""

    case: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, prompt: str | list[int], **params: Any) -> None:
        """Append a request; `Session.run` explains the keys that are no sampling parameters."""
        own = ("arrive", "abort_after", "follow", "images", "lora", "cache_salt")
        given = {key: params.pop(key) for key in own if key in params}
        self.requests.append({"id": name, "prompt": prompt, **given, "params": params})


class Runner:
    """Runs engines and stores their results in `folder`, which xdist processes share.

    Args:
        folder: created if missing; results, logs and the engines' caches.
        cpu_s: the CPU seconds of every engine that runs are appended here.
    """

    def __init__(self, folder: Path, cpu_s: list[float]) -> None:
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._pool = ThreadPoolExecutor(max(1, (4 if ON_GPU else 2) // processes))
        self._done: dict[str, Future[dict[str, Any]]] = {}
        self._folder = folder
        self._cpu_s = cpu_s
        folder.mkdir(parents=True, exist_ok=True)
        self.caches = caches(folder)
        share_machine_code(Path(self.caches["VLLM_BASTION_CACHE"]))
        share_model_infos(Path(self.caches["VLLM_CACHE_ROOT"]))
        self._environment = environment = {**ENVIRONMENT, **self.caches}
        if ON_GPU:
            # A process that has initialised CUDA must not be forked.
            self._context: Any = multiprocessing.get_context("spawn")
            os.environ.update(environment)
            return
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        # Python 3.11 starts the server without this process's path.
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with changed_environment({**environment, "PYTHONPATH": path.rstrip(os.pathsep)}):
            forkserver.ensure_running()

    def submit(
        self, engine: Engine, batches: Sequence[Batch], **spec_keys: Any
    ) -> Future[dict[str, Any]]:
        """Start a run, or find the one that has the same spec, which has `spec_keys` too.

        With `interpreted=True` an engine on a CPU runs vLLM's Triton kernels in the interpreter;
        with `images=True` requests may have images.
        """
        if not ON_GPU and engine.speculative.get("method", "bastion") != "bastion":
            spec_keys["interpreted"] = True  # its kernels have no CPU replacements
        asked = [{"requests": batch.requests} for batch in batches]
        costs = {} if engine.costs is None or not engine.speculative else {"costs": engine.costs}
        spec = {"engine": engine.arguments(), "batches": asked, **costs, **spec_keys}
        key = json.dumps(spec, sort_keys=True)
        if key not in self._done:
            self._done[key] = self._pool.submit(self._run, spec, key)
        return self._done[key]

    def all(
        self, engines: Sequence[Engine], batches: Sequence[Batch], **spec_keys: Any
    ) -> list[dict[str, Any]]:
        runs = [self.submit(engine, batches, **spec_keys) for engine in engines]
        return [run.result() for run in runs]

    def run(self, engine: Engine, batches: Sequence[Batch], **spec_keys: Any) -> dict[str, Any]:
        return self.submit(engine, batches, **spec_keys).result()

    def command(self, *words: str) -> str:
        """Run `vllm` with these words, and return what it prints; raises an EngineError."""
        spec = {"command": words}
        return str(self._run(spec, json.dumps(spec))["output"])

    def _process(self, spec: dict[str, Any], log: Path) -> EngineProcess:
        # The fork server has imported vLLM without Triton's interpreter and without torchvision.
        if not ON_GPU and spec.get("interpreted"):
            return EngineProcess(log, {**self._environment, **_INTERPRETED})
        if not ON_GPU and spec.get("images"):
            return EngineProcess(log, self._environment)
        return EngineProcess(log, context=self._context)

    def _run(self, spec: dict[str, Any], key: str) -> dict[str, Any]:
        stem = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        result, log = stem.with_suffix(".json"), stem.with_suffix(".log")
        with FileLock(stem.with_suffix(".lock")):
            if result.exists():
                return dict(json.loads(result.read_text()))
            process = self._process(spec, log)
            try:
                process.call(work, spec, str(log))
                text = json.dumps(process.answer(timeout_s=_TIMEOUT_S))
            finally:
                process.close(_EXIT_S)
            result.write_text(text)
        answer = dict(json.loads(text))
        self._cpu_s.append(answer.get("cpu_s", 0.0))
        return answer


def share_model_infos(cache: Path) -> None:
    """Link vLLM's own notes on its models: without them, servers import vLLM once more."""
    users = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / "modelinfos"
    users.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (cache / "modelinfos").symlink_to(users)


def share_machine_code(cache: Path) -> None:
    """Link the user's caches of machine code, whose names are digests of what it is made from."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "links.lock"):
        for name in ("numba", "kernels"):
            ours, users = cache / name, cache_dir() / name
            users.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not ours.exists():
                ours.symlink_to(users.resolve())
