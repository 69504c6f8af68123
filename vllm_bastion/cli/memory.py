# SPDX-License-Identifier: Apache-2.0
"""What an engine of method "bastion" takes beside plain decoding, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from vllm_bastion import checkpoint
from vllm_bastion.config import bastion_config
from vllm_bastion.drafter_rules import layers_read
from vllm_bastion.policy.trees import Trees


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        weights: the drafter's; None if their headers cannot be read.
        hidden: hidden states of accepted rows, for the drafter.
        trees: of all requests.
        logits: a step's rows beyond one for each request, fp32.
        cached_token: a token's keys and values, the target's.
        cached_draft: what the drafter adds to them.
    """

    weights: int | None
    hidden: int
    trees: int
    logits: int
    cached_token: int
    cached_draft: int

    def lines(self) -> list[str]:
        """One line for each part."""
        weights = "unknown" if self.weights is None else mib(self.weights)
        added = 100 * self.cached_draft / self.cached_token if self.cached_token else 0.0
        return [
            f"drafter's weights {weights}; vLLM counts everything before it sizes the KV cache",
            f"hidden states of accepted rows {mib(self.hidden)}, trees {mib(self.trees)}, logits "
            f"of a step's nodes up to {mib(self.logits)}",
            f"KV cache: a token takes {self.cached_token + self.cached_draft} bytes instead of "
            f"{self.cached_token} ({added:.0f}% more)",
        ]


def memory_of(config: VllmConfig) -> Memory:
    """The memory of a worker of this engine."""
    spec = bastion_config(config)
    assert spec is not None
    model, draft, parallel = config.model_config, spec.draft_model_config, config.parallel_config
    trees = trees_of(config)
    keeps = not (trees.chains and trees.budget is not None)
    rows = config.scheduler_config.max_num_batched_tokens
    layers = max(1, len(layers_read(draft.hf_config)))
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    most = min(rows, get_max_chunk_logits(model.get_vocab_size()))
    nodes = min(config.scheduler_config.max_num_seqs * spec.num_speculative_tokens, most)
    return Memory(
        weights=_weights(draft),
        hidden=rows * model.get_hidden_size() * layers * model.dtype.itemsize * keeps,
        trees=tensor_bytes(trees),
        logits=4 * nodes * model.get_vocab_size(),
        cached_token=_cached_token(config, model, parallel),
        cached_draft=_cached_token(config, draft, parallel),
    )


def trees_of(config: VllmConfig) -> Trees:
    """The trees that a worker of this engine would allocate, on the CPU."""
    spec = bastion_config(config)
    assert spec is not None
    scheduler, budget = config.scheduler_config, spec.bastion_budget
    return Trees(
        max_num_reqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        num_nodes=spec.num_speculative_tokens,
        depth=spec.bastion_gamma,
        top_k=1 if config.model_config.logits_processors else spec.bastion_top_k,
        budget=None if budget == "adaptive" else int(budget),
        device=torch.device("cpu"),
    )


def tensor_bytes(owner: object) -> int:
    """Bytes of the tensors that are attributes of `owner`; views count once."""
    tensors = [value for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _cached_token(config: VllmConfig, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Bytes of a token's keys and values in all attention layers of a worker."""
    cache_dtype = config.cache_config.cache_dtype
    dtype = model.dtype if cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache_dtype]
    layers = model.get_num_layers_by_block_type(parallel)
    return 2 * layers * model.get_num_kv_heads(parallel) * model.get_head_size() * dtype.itemsize


def _weights(draft: ModelConfig) -> int | None:
    """Bytes of the drafter's weights as it holds them in `draft.dtype`, by its files' headers."""
    elements = checkpoint.elements(draft.model, draft.revision)
    return None if elements is None else elements * draft.dtype.itemsize


def mib(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / 2**20:.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.1f} GiB"
