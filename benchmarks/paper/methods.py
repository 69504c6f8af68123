# SPDX-License-Identifier: Apache-2.0
"""The methods of the table: names, engines, and what each is compared with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from transformers import PretrainedConfig

from benchmarks.harness.engine import UserEngine, bastion, dflash
from benchmarks.prompts import DataError
from vllm_bastion.policy.cost.paper import ModelShape

PLAIN = "plain"
# Plain decoding in the model runner that bastion uses. A CPU host otherwise decodes with another
# one, whose seeded draws differ.
REFERENCE = "plain, V2 runner"
CHAIN, ADAPTIVE = "bastion chain", "bastion adaptive"
V2 = ", V2 runner"
EAGLE3, NGRAM, SUFFIX = "eagle3", "ngram", "suffix"
BEAM = "beam 4x{depth} (replayed)"
ESTIMATORS = ("static", "ema", "ema_calib")
# Lengths of vLLM's own chain; those of a drafter whose block is too short for the longest.
CHAINS, SHALLOW_CHAINS = (4, 7, 15), (2, 3, 5, 7)
ALL_CHAINS = tuple(sorted({*CHAINS, *SHALLOW_CHAINS}))
EAGLE3_CHAINS = (3, 5, 7)
BUDGETS_GPU, BUDGETS_CPU = (16, 32, 64, 128, 256), (16, 32, 63)

# Memory of an engine besides its KV cache: its weights in the layouts of their kernels too, and
# libraries and compiled code.
_WEIGHTS, _OVERHEAD_BYTES = 2.2, 3 << 28
# Of a GPU's memory for all engines together, and slots of a request beyond its context: nodes,
# drafted positions and a block that is not full.
_GPU_SHARE, _SLOTS = 0.9, 512
_ENVIRONMENT = {
    # Steps are counted in the engine's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def chain_name(length: int, drafter: str = "") -> str:
    """Row of vLLM's own chain; `drafter` is the label of another drafter than the target's own."""
    return f"{drafter or 'dflash'} {length}"


def fixed_name(nodes: int) -> str:
    return f"bastion N={nodes}"


@dataclass(frozen=True)
class Drafter:
    """A further drafter of a target.

    Args:
        name: on the Hub, or a folder.
        gamma: its depth.
        method: vLLM's method for its chain.
        first_runner: whether vLLM's V1 runner, which a CPU host uses, has it too.
    """

    name: str
    gamma: int
    method: str = "dflash"
    first_runner: bool = True


@dataclass(frozen=True)
class Target:
    """What is evaluated: names on the Hub, or folders.

    Args:
        gamma: the drafter's depth.
        others: further drafters of the target.
    """

    target: str
    drafter: str | None
    gamma: int
    eagle3: str | None = None
    others: Sequence[Drafter] = ()


@dataclass(frozen=True)
class Method:
    name: str
    speculative: dict[str, Any] | None
    ours: bool = False
    # bastion keeps plain decoding's seeded draws; vLLM's methods keep the distribution alone.
    same_draws: bool = False
    # engines in Model Runner V2 although vLLM would choose another
    second_runner: bool = False

    @property
    def measures(self) -> bool:
        """Whether its engine times its own steps while it starts."""
        return (self.speculative or {}).get("bastion_budget") == "adaptive"

    def engine(self, target: str, cpu: bool, **settings: Any) -> UserEngine:
        environment = dict(_ENVIRONMENT)
        if not (self.ours or self.second_runner):
            environment["VLLM_PLUGINS"] = ""
        if self.second_runner:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if cpu:
            # In GiB; by default an engine takes half of the memory.
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(
                _cache_gib(settings.get("max_model_len", 0))
            )
        return UserEngine(self.speculative, Path(target), environment=environment, **settings)


def methods(what: Target, *, cpu: bool, budgets: Sequence[int] = ()) -> dict[str, Method]:
    """All methods by name, plain decoding first.

    budgets: fixed budgets, by default those of the machine.
    """
    budgets = budgets or (BUDGETS_CPU if cpu else BUDGETS_GPU)
    rows = [Method(PLAIN, None, same_draws=True)]
    if cpu:
        rows.append(Method(REFERENCE, None, same_draws=True, second_runner=True))
    if what.eagle3 is not None:
        rows += [
            Method(f"{EAGLE3} {n}", dflash(Path(what.eagle3), n, "eagle3")) for n in EAGLE3_CHAINS
        ]
    if what.drafter is not None:
        rows += _of_drafter("", Drafter(what.drafter, what.gamma), cpu, budgets)
    for other in what.others:
        rows += _of_drafter(Path(other.name).name, other, cpu, budgets)
    lookup = {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    rows.append(Method(NGRAM, {"method": "ngram", **lookup}))
    rows.append(Method(SUFFIX, {"method": "suffix", "num_speculative_tokens": 32}))
    return {row.name: row for row in rows}


def _of_drafter(label: str, drafter: Drafter, cpu: bool, budgets: Sequence[int]) -> list[Method]:
    folder, gamma, nodes = Path(drafter.name), drafter.gamma, 63 if cpu else 255

    def ours(name: str, most: int, budget: int | str, **keys: Any) -> Method:
        full = name.replace("bastion", f"bastion {label}") if label else name
        # The paper's method has no copies.
        own = {"lookup": False, **keys}
        return Method(full, bastion(folder, most, budget, **own), True, True)

    known = CHAINS if gamma >= max(CHAINS) else SHALLOW_CHAINS
    chains = {chain_name(n, label): dflash(folder, n, drafter.method) for n in known if n <= gamma}
    first = [Method(name, chain) for name, chain in chains.items()]
    second = [Method(name + V2, chain, second_runner=True) for name, chain in chains.items()]
    rows = (first if drafter.first_runner or not cpu else []) + (second if cpu else [])
    if not cpu:
        # vLLM sizes its chains by their confidence in FULL graphs alone.
        more = {"enable_adaptive_verification": True}
        rows += [
            Method(f"{name}, adaptive verification", {**chain, **more})
            for name, chain in chains.items()
        ]
    rows.append(ours(CHAIN, gamma, gamma, top_k=1))
    rows += [ours(fixed_name(n), n, n) for n in budgets]
    if not label:
        rows += [
            ours(f"bastion {name}", nodes, "adaptive", latency_model=name) for name in ESTIMATORS
        ]
    rows += [ours(f"bastion lookup N={n}", n, n, lookup=True) for n in budgets]
    rows.append(ours("bastion lookup", nodes, "adaptive", lookup=True))
    return [*rows, ours(ADAPTIVE, nodes, "adaptive")]


def chosen(rows: dict[str, Method], parts: Sequence[str], sampled: bool) -> dict[str, Method]:
    """The methods that are named (all without any), and what they need.

    Args:
        parts: a method's name, or a part that all methods with it in their name share.
        sampled: whether any temperature is above 0, where a CPU host needs the second reference.

    Raises:
        DataError: no method has one of `parts` in its name.
    """
    names = {PLAIN, REFERENCE} if sampled else {PLAIN}
    for part in parts:
        found = [part] if part in rows else [name for name in rows if part in name]
        if not found:
            raise DataError(f"no method has {part!r} in its name: choose from {'; '.join(rows)}")
        names.update(found)
    return {name: row for name, row in rows.items() if name in names or not parts}


def groups(names: Sequence[str], alive: int) -> list[list[str]]:
    """Split names into groups of engines that live side by side, plain decoding in each.

    With one engine at a time, each is a group of its own, and plain decoding is the first.
    """
    others = [name for name in names if name != PLAIN]
    if alive < 2:
        return [[PLAIN], *([name] for name in others)]
    size = alive - 1
    return [[PLAIN, *others[i : i + size]] for i in range(0, max(1, len(others)), size)]


def engines_of(
    what: Target, cpu: bool, alive: int, **settings: Any
) -> Callable[[Method, int], UserEngine]:
    """From a method and a concurrency to its engine; `settings` are fields of `UserEngine`.

    On a GPU, `alive` engines get equal shares of the memory and a KV cache of the size they need:
    vLLM would measure what is free, which changes while others start.
    """

    def engine(method: Method, concurrency: int) -> UserEngine:
        own = dict(settings)
        if alive > 1 and not cpu:
            own |= gpu_share(what, alive, concurrency, settings["max_model_len"])
        return method.engine(what.target, cpu, max_num_seqs=concurrency, **own)

    return engine


def gpu_share(what: Target, alive: int, concurrency: int, max_model_len: int) -> dict[str, Any]:
    """The memory of a GPU that one of `alive` engines gets, as fields of `UserEngine`.

    Raises DataError: the size of the KV cache is not known.
    """
    tokens = concurrency * (max_model_len + _SLOTS)
    return {"memory": _GPU_SHARE / alive, "kv_cache_bytes": _token_bytes(what) * tokens}


def _token_bytes(what: Target) -> int:
    """Bytes of a token in the KV caches of a target and its drafter, in two-byte numbers.

    Raises DataError: a config has not the usual names, so the size is not known.
    """
    total = 0
    for name in (what.target, what.drafter):
        if name is None:
            continue
        try:
            shape = ModelShape.from_config(config_of(name))
        except ValueError as error:
            raise DataError(
                f"the config of {Path(name).name} does not say how large its KV cache is "
                f"({error}): use --alive 1"
            ) from error
        total += 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return total


def _cache_gib(max_model_len: int) -> int:
    """1 GiB, and one more for every 8192 tokens: Qwen3-0.6B with its drafter needs 0.13 MB each."""
    return 1 + max_model_len // 8192


def fitting(what: Target, max_model_len: int) -> int:
    """How many engines of a target in local folders fit into the free memory, at least two."""
    folders = [what.target, *([what.drafter] if what.drafter is not None else [])]
    weights = sum(
        path.stat().st_size for one in folders for path in Path(one).glob("*.safetensors")
    )
    each = _WEIGHTS * weights + _OVERHEAD_BYTES + (_cache_gib(max_model_len) << 30)
    return max(2, int(0.9 * psutil.virtual_memory().available / each))


def reference_of(method: Method, temperature: float, ran: Sequence[str]) -> str | None:
    """Which method's tokens this one must emit, or None where only the distribution is kept."""
    if temperature == 0:
        return PLAIN
    if not method.same_draws:
        return None
    # Its own draws depend on the runner.
    if REFERENCE in ran:
        return None if method.name == PLAIN else REFERENCE
    return PLAIN


def config_of(name: str) -> Any:
    """A checkpoint's config, of a folder or of the Hub. Raises DataError: it cannot be had."""
    try:
        config, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        raise DataError(f"no model {name}: no such folder, and the Hub does not give it") from error
    return argparse.Namespace(**{"architectures": None, **config})
