# SPDX-License-Identifier: Apache-2.0
"""The methods of the table: names, engines, and what each is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import bastion, dflash
from benchmarks.speed.methods import PLAIN, SpeedEngine, chain_name, fixed_name

# Plain decoding in the model runner that bastion uses. A CPU host otherwise decodes with another
# one, whose seeded draws differ.
REFERENCE = "plain, V2 runner"
CHAIN, ADAPTIVE = "bastion chain", "bastion adaptive"
EAGLE3, NGRAM, SUFFIX = "eagle3", "ngram", "suffix"
BEAM = "beam 4x{depth} (replayed)"
ESTIMATORS = ("static", "ema", "ema_calib")
CHAINS, EAGLE3_CHAINS = (4, 7, 15), (3, 5, 7)
BUDGETS_GPU, BUDGETS_CPU = (16, 32, 64, 128, 256), (16, 32, 63)

_ENVIRONMENT = {
    # Steps are counted in the engine's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Target:
    """What is evaluated: names on the Hub, or folders.

    Args:
        gamma: the drafter's depth.
        others: further drafters of the target: folder or name -> vLLM's method.
    """

    target: str
    drafter: str | None
    gamma: int
    eagle3: str | None = None
    others: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    speculative: dict[str, Any] | None
    ours: bool = False
    # bastion keeps plain decoding's seeded draws; vLLM's methods keep the distribution alone.
    same_draws: bool = False
    # engines in Model Runner V2 although vLLM would choose another
    second_runner: bool = False

    def engine(self, target: str, cpu: bool, **settings: Any) -> SpeedEngine:
        """The engine; `settings` are fields of `SpeedEngine`."""
        environment = dict(_ENVIRONMENT)
        if not (self.ours or self.second_runner):
            environment["VLLM_PLUGINS"] = ""
        if self.second_runner:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if cpu:
            # In GiB; by default an engine takes half of the memory.
            environment["VLLM_CPU_KVCACHE_SPACE"] = "4" if settings["max_model_len"] > 4096 else "1"
        return SpeedEngine(self.speculative, Path(target), environment=environment, **settings)


def methods(
    what: Target, *, cpu: bool, budgets: Sequence[int] = (), nodes: int | None = None
) -> dict[str, Method]:
    """All methods by name, plain decoding first.

    Args:
        budgets: fixed budgets, by default those of the machine.
        nodes: the most that the adaptive engine verifies.
    """
    budgets = budgets or (BUDGETS_CPU if cpu else BUDGETS_GPU)
    nodes = nodes or (63 if cpu else 255)
    rows = [Method(PLAIN, None, same_draws=True)]
    if cpu:
        rows.append(Method(REFERENCE, None, same_draws=True, second_runner=True))
    if what.eagle3 is not None:
        rows += [
            Method(f"{EAGLE3} {n}", dflash(Path(what.eagle3), n, "eagle3")) for n in EAGLE3_CHAINS
        ]
    drafters = {} if what.drafter is None else {"": (what.drafter, "dflash")}
    drafters |= {Path(one).name: (one, method) for one, method in what.others.items()}
    for label, (drafter, method) in drafters.items():
        rows += _of_drafter(label, Path(drafter), method, what.gamma, cpu, budgets, nodes)
    lookup = {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    rows.append(Method(NGRAM, {"method": "ngram", **lookup}))
    rows.append(Method(SUFFIX, {"method": "suffix", "num_speculative_tokens": 32}))
    return {row.name: row for row in rows}


def _of_drafter(
    label: str,
    drafter: Path,
    method: str,
    gamma: int,
    cpu: bool,
    budgets: Sequence[int],
    nodes: int,
) -> list[Method]:
    def ours(name: str, most: int, budget: int | str, **keys: Any) -> Method:
        full = name.replace("bastion", f"bastion {label}") if label else name
        return Method(full, bastion(drafter, most, budget, **keys), True, True)

    chains = [n for n in CHAINS if n <= gamma]
    rows = [Method(chain_name(n, label), dflash(drafter, n, method)) for n in chains]
    if not cpu:
        # vLLM sizes its chains by their confidence in FULL graphs alone.
        rows += [
            Method(
                f"{chain_name(n, label)}, adaptive verification",
                {**dflash(drafter, n, method), "enable_adaptive_verification": True},
            )
            for n in chains
        ]
    rows.append(ours(CHAIN, gamma, gamma, top_k=1))
    rows += [ours(fixed_name(n), n, n) for n in budgets]
    if not label:
        rows += [
            ours(f"bastion {name}", nodes, "adaptive", latency_model=name) for name in ESTIMATORS
        ]
    return [*rows, ours(ADAPTIVE, nodes, "adaptive")]


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
