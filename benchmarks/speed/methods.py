# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared: name, settings and environment of every engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import Engine, bastion, dflash

PLAIN = "plain"
CHAINS = (4, 7, 15)
BUDGETS = (8, 16, 32, 63, 127)
# The most nodes that the adaptive engine may verify.
NODES = 63

_COMMON = {
    # Steps are counted in the engine's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_WITHOUT_US = {"VLLM_PLUGINS": ""}


@dataclass(frozen=True)
class SpeedEngine(Engine):
    """An engine as a user starts it; `environment` is added to the user's."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    eager: bool = False
    prefix_caching: bool | None = False  # a repeat must not find the cache of the one before
    environment: dict[str, str] = field(default_factory=dict)
    cudagraphs: str | None = None  # vLLM's `cudagraph_mode`

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""
        arguments = super().arguments()
        if self.cudagraphs is not None:
            arguments["compilation_config"] = {"cudagraph_mode": self.cudagraphs}
        return arguments

    def variables(self) -> dict[str, str]:
        """Environment variables to add to the user's."""
        return self.environment


# Names of rows. `drafter` is the folder of another drafter than the pair's own.


def chain_name(length: int, drafter: str = "") -> str:
    """Row of vLLM's own chain."""
    return f"{drafter or 'dflash'} {length}"


def fixed_name(nodes: int, drafter: str = "") -> str:
    """Row of a fixed budget."""
    return f"{_ours(drafter)} N={nodes}"


def adaptive_name(drafter: str = "") -> str:
    """Row of the adaptive engine."""
    return f"{_ours(drafter)} adaptive"


def _ours(drafter: str) -> str:
    return f"bastion {drafter}" if drafter else "bastion"


ADAPTIVE = adaptive_name()


def engines(
    pair: Path, others: dict[Path, str] | None = None, **settings: Any
) -> dict[str, SpeedEngine]:
    """All methods by the names of their rows.

    Args:
        others: vLLM's method by folder, for further drafters of the pair's target.
        settings: fields of `SpeedEngine`.
    """
    drafters = {"": (pair / "drafter", "dflash")}
    drafters |= {folder.name: (folder, method) for folder, method in (others or {}).items()}
    without = {**_COMMON, **_WITHOUT_US}
    with_us = dict(_COMMON)
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # In GiB; by default every engine would take half of the memory.
        without["VLLM_CPU_KVCACHE_SPACE"] = with_us["VLLM_CPU_KVCACHE_SPACE"] = "1"

    def make(speculative: dict[str, Any] | None, environment: dict[str, str]) -> SpeedEngine:
        return SpeedEngine(speculative, pair / "target", environment=environment, **settings)

    rows = {PLAIN: make(None, without)}
    for name, (folder, method) in drafters.items():
        for n in CHAINS:
            rows[chain_name(n, name)] = make(dflash(folder, n, method), without)
        for n in BUDGETS:
            rows[fixed_name(n, name)] = make(bastion(folder, n, n), with_us)
        rows[adaptive_name(name)] = make(bastion(folder, NODES, "adaptive"), with_us)
    return rows


def groups(names: list[str], at_a_time: int) -> list[list[str]]:
    """Split names into groups of at most `at_a_time` engines, plain decoding first in each.

    Raises:
        ValueError: fewer than two at a time, so that nothing can be compared.
    """
    others = [name for name in names if name != PLAIN]
    if at_a_time >= len(others) + 1:
        return [[PLAIN, *others]]
    if at_a_time < 2:
        raise ValueError("at least two engines must live at a time: plain decoding and another")
    size = at_a_time - 1
    return [[PLAIN, *others[i : i + size]] for i in range(0, len(others), size)]
