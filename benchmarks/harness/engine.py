# SPDX-License-Identifier: Apache-2.0
"""An engine's configuration, and the requests that it decodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What to decode. The response carries the same `name`. `prompt`: text, or token ids."""

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
    """An engine as a user starts it.

    Args:
        speculative: vLLM's `speculative_config`, or None for plain decoding.
        environment: variables, added to the user's.
        kv_cache_bytes: None for what fits, on a CPU for `VLLM_CPU_KVCACHE_SPACE`.
        cudagraphs: vLLM's `cudagraph_mode`.
        memory: vLLM's `gpu_memory_utilization`.
        more: further arguments of `LLM`, which win.
        checkout: the folder of another checkout, whose package the engine runs.
        probe: `module:function`, called in the engine's process with its `LLM`. It returns a
            function whose result is `Driver.probed`'s.
    """

    speculative: dict[str, Any] | None
    target: Path
    environment: dict[str, str] = field(default_factory=dict)
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    max_model_len: int = 512
    dtype: str = "auto"
    eager: bool = False
    kv_cache_bytes: int | None = None
    cudagraphs: str | None = None
    memory: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    checkout: Path | None = None
    probe: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Of `LLM`."""
        arguments = {
            "model": str(self.target),
            "speculative_config": self.speculative,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            # A repeat must not find the cache of the one before.
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.memory is not None:
            arguments["gpu_memory_utilization"] = self.memory
        if self.cudagraphs is not None:
            arguments["compilation_config"] = {"cudagraph_mode": self.cudagraphs}
        return arguments | self.more

    def paths(self) -> tuple[Path, ...]:
        """Folders in front of the process's `sys.path`."""
        return () if self.checkout is None else (self.checkout, self.checkout / "kernels")
