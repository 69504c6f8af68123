# SPDX-License-Identifier: Apache-2.0
"""An engine's configuration, and the requests that it decodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import TINY

GAMMA = 15  # drafted depth of the tiny pair: block_size - 1
# vLLM's `max_num_batched_tokens`. Small because vLLM's kernels pad up to it, in a loop on a CPU.
ROWS = 128

# Model Runner V2 for every method: plain decoding then has the same seeded draws as bastion.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_ENVIRONMENT = {
    _RUNNER: "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # With tensors this small, waking a second thread costs more than it saves.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Request:
    """What to decode. The completion carries the same `name`. `prompt`: text, or token ids."""

    name: str
    prompt: str | list[int]
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    # Further arguments of `SamplingParams`, as JSON has them.
    params: dict[str, Any] = field(default_factory=dict)

    def sampling_params(self) -> Any:
        """vLLM's `SamplingParams`. Only a grammar may end a request before its last token."""
        return sampling_params(
            {
                "ignore_eos": "structured_outputs" not in self.params,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed,
                **self.params,
            }
        )

    def vllm_prompt(self) -> Any:
        if isinstance(self.prompt, str):
            return self.prompt
        return {"prompt_token_ids": self.prompt}


def sampling_params(given: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(given)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


@dataclass(frozen=True)
class Engine:
    """An engine's configuration.

    Args:
        speculative: vLLM's `speculative_config`, or None for plain decoding.
        prefix_caching: None for vLLM's default.
        kv_cache_bytes: None for `VLLM_CPU_KVCACHE_SPACE`, which also overrides a number.
        probe: `module:function`, called in the engine's process with its `LLM` before the first
            request. It returns a function whose result, after the last request, is `Run.probed`.
        timed: choose the model runner as vLLM does, and decode a request to warm up.
    """

    speculative: dict[str, Any] | None = None
    target: Path = TINY / "target"
    max_num_seqs: int = 1
    max_num_batched_tokens: int | None = ROWS
    max_model_len: int = 512
    dtype: str = "float32"
    eager: bool = True
    prefix_caching: bool | None = None
    kv_cache_bytes: int | None = None
    probe: str | None = None
    timed: bool = False

    def variables(self) -> dict[str, str]:
        return {
            name: value
            for name, value in _ENVIRONMENT.items()
            if name not in os.environ and not (self.timed and name == _RUNNER)
        }

    def paths(self) -> tuple[Path, ...]:
        """Folders in front of the process's `sys.path`."""
        return ()

    def arguments(self) -> dict[str, Any]:
        return {
            "model": str(self.target),
            "speculative_config": self.speculative,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }


@dataclass(frozen=True)
class UserEngine(Engine):
    """An engine as a user starts it; `environment` is added to the user's.

    checkout: the folder of another checkout, whose package the engine runs.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    eager: bool = False
    prefix_caching: bool | None = False  # a repeat must not find the cache of the one before
    environment: dict[str, str] = field(default_factory=dict)
    cudagraphs: str | None = None  # vLLM's `cudagraph_mode`
    memory: float | None = None  # vLLM's `gpu_memory_utilization`
    more: dict[str, Any] = field(default_factory=dict)  # further arguments, which win
    checkout: Path | None = None

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        if self.memory is not None:
            arguments["gpu_memory_utilization"] = self.memory
        if self.cudagraphs is not None:
            arguments["compilation_config"] = {"cudagraph_mode": self.cudagraphs}
        return arguments | self.more

    def variables(self) -> dict[str, str]:
        return self.environment

    def paths(self) -> tuple[Path, ...]:
        return () if self.checkout is None else (self.checkout, self.checkout / "kernels")


def dflash(drafter: Path, gamma: int = GAMMA, method: str = "dflash") -> dict[str, Any]:
    return {"method": method, "model": str(drafter), "num_speculative_tokens": gamma}


def bastion(drafter: Path, nodes: int, budget: int | str, **keys: Any) -> dict[str, Any]:
    """`speculative_config` of method "bastion"; `keys` are given without their `bastion_`."""
    own = {f"bastion_{name}": value for name, value in keys.items()}
    return {
        "method": "bastion",
        "model": str(drafter),
        "num_speculative_tokens": nodes,
        "bastion_budget": budget,
        **own,
    }
