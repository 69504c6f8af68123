# SPDX-License-Identifier: Apache-2.0
"""What is compared: the name, the settings and the environment of every engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import Engine, bastion, dflash

PLAIN, ADAPTIVE = "plain", "bastion adaptive"
CHAINS = (4, 7, 15)
BUDGETS = (8, 16, 32, 63, 127)
# What the adaptive engine may verify at most.
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
    dtype: str = "auto"
    eager: bool = False
    # None: vLLM's own
    rows: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""
        arguments = {
            **super().arguments(),
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_num_batched_tokens": self.rows,
        }
        # A repeat must find nothing of the one before.
        return arguments | {"enable_prefix_caching": False}


def dflash_name(length: int) -> str:
    """Row of vLLM's own chain."""
    return f"dflash {length}"


def fixed_name(nodes: int) -> str:
    """Row of a fixed budget."""
    return f"bastion N={nodes}"


def engines(pair: Path, **settings: Any) -> dict[str, SpeedEngine]:
    """All methods by the name of their row; `settings` are fields of `SpeedEngine`."""
    drafter = pair / "drafter"
    without = {**_COMMON, **_WITHOUT_US}
    with_us = dict(_COMMON)
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # GiB; vLLM would take half of the memory, once per engine.
        without["VLLM_CPU_KVCACHE_SPACE"] = with_us["VLLM_CPU_KVCACHE_SPACE"] = "1"

    def make(speculative: dict[str, Any] | None, environment: dict[str, str]) -> SpeedEngine:
        return SpeedEngine(speculative, pair / "target", environment=environment, **settings)

    return {
        PLAIN: make(None, without),
        **{dflash_name(n): make(dflash(drafter, n), without) for n in CHAINS},
        **{fixed_name(n): make(bastion(drafter, n, n), with_us) for n in BUDGETS},
        ADAPTIVE: make(bastion(drafter, NODES, "adaptive"), with_us),
    }


def groups(names: list[str], at_a_time: int) -> list[list[str]]:
    """Names in groups of at most that many engines, each with plain decoding first.

    Raises:
        ValueError: fewer than two at a time, where there is something to compare.
    """
    others = [name for name in names if name != PLAIN]
    if at_a_time >= len(others) + 1:
        return [[PLAIN, *others]]
    if at_a_time < 2:
        raise ValueError("at least two engines must live at a time: plain decoding and another")
    size = at_a_time - 1
    return [[PLAIN, *others[i : i + size]] for i in range(0, len(others), size)]
