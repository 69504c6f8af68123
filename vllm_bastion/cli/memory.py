# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine of method "bastion" needs beyond plain decoding, by configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from vllm_bastion.checkpoints import files
from vllm_bastion.checkpoints.rules import layers_read
from vllm_bastion.cli.buffers import Part, Sizes, buffers, logits, size, total
from vllm_bastion.config import settings_of
from vllm_bastion.engine.limits import make_trees, max_bitmask_rows, max_verified_rows
from vllm_bastion.policy.trees import Trees
from vllm_bastion.versions import capabilities


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        weights: the drafter's; None if their headers cannot be read.
        buffers: what lives as long as the engine.
        logits: what comes and goes.
        cached_token: a token's keys and values, the target's.
        cached_draft: a token's keys and values, the drafter's.
    """

    weights: int | None
    buffers: tuple[Part, ...]
    logits: tuple[Part, ...]
    cached_token: int
    cached_draft: int

    def lines(self) -> list[str]:
        """One line for each part."""
        weights = "unknown" if self.weights is None else size(self.weights)
        added = 100 * self.cached_draft / self.cached_token if self.cached_token else 0.0
        all_ = total(list(self.buffers))
        parts = ", ".join(f"{part.name} {size(part.ours)}" for part in self.buffers if part.ours)
        draft, verified = self.logits
        return [
            f"drafter's weights {weights}; vLLM counts everything before it sizes the KV cache",
            f"buffers {size(all_.ours)} (vLLM's dflash {size(all_.vllms)}): {parts}",
            f"logits of {draft.name} up to {size(draft.ours)} (dflash {size(draft.vllms)}), of "
            f"{verified.name} up to {size(verified.ours)} ({size(verified.vllms)})",
            f"KV cache: a token takes {self.cached_token + self.cached_draft} bytes instead of "
            f"{self.cached_token} ({added:.0f}% more)",
        ]


def memory_of(config: VllmConfig) -> Memory:
    """The memory of a worker of this engine."""
    spec = settings_of(config)
    model, draft, parallel = config.model_config, spec.draft_model_config, config.parallel_config
    sizes = sizes_of(config)
    return Memory(
        weights=_weights(draft),
        buffers=tuple(buffers(sizes)),
        logits=tuple(logits(sizes)),
        cached_token=_cached_token(config, model, parallel),
        cached_draft=_cached_token(config, draft, parallel),
    )


def sizes_of(config: VllmConfig) -> Sizes:
    """The sizes of a worker of this engine."""
    spec = settings_of(config)
    model, draft, scheduler = config.model_config, spec.draft_model_config, config.scheduler_config
    trees = trees_of(config)
    layers = max(1, len(layers_read(draft.hf_config)))
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    return Sizes(
        requests=scheduler.max_num_seqs,
        step_rows=scheduler.max_num_batched_tokens,
        nodes=spec.num_speculative_tokens,
        depth=spec.bastion_gamma,
        vocab=model.get_vocab_size(),
        hidden=model.get_hidden_size() * layers,
        draft_hidden=draft.get_hidden_size(),
        item=model.dtype.itemsize,
        verified_rows=max_verified_rows(config),
        bitmask_rows=max_bitmask_rows(config),
        trees=tensor_bytes(trees),
        attention=_attention(config),
        recurrent_row=_recurrent_row(config),
        draft_groups=len(set(getattr(draft.hf_config, "layer_types", None) or ["full_attention"])),
        keeps_hidden=not (trees.chains and trees.budget is not None),
        stages=graphs and capabilities().stages_hidden_states,
    )


def trees_of(config: VllmConfig) -> Trees:
    """The trees that a worker of this engine would allocate, on the CPU."""
    trees = make_trees(config, torch.device("cpu"))
    if config.model_config.logits_processors:
        trees.use_chains()
    return trees


def tensor_bytes(owner: object) -> int:
    """Bytes of the tensors that are attributes of `owner`, or in its lists; views count once."""
    held: list[object] = []
    for value in vars(owner).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    storages = [value.untyped_storage() for value in held if isinstance(value, torch.Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def attention_bytes(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, processors: int, rows: int, reqs: int
) -> int:
    """Bytes that tree attention keeps on a GPU with `processors` multiprocessors."""
    workspace = TreeAttentionWorkspace(
        heads, kv_heads, dim, dtype, rows, reqs, "cpu", processors=processors
    )
    return tensor_bytes(workspace)


def _attention(config: VllmConfig) -> int:
    if not current_platform.is_cuda_alike():
        return 0
    model, parallel = config.model_config, config.parallel_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ["full_attention"])
    windows = kinds & {"full_attention", "sliding_attention"}
    return len(windows) * attention_bytes(
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
        model.dtype,
        current_platform.num_compute_units(),
        config.scheduler_config.max_num_batched_tokens,
        config.scheduler_config.max_num_seqs,
    )


def _recurrent_row(config: VllmConfig) -> int:
    """Bytes of a row's `attention.gated_delta.CommitInputs` in all layers; 0 if there are none."""
    if not config.model_config.is_hybrid:
        return 0
    text, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
    layers = list(getattr(text, "layer_types", None) or ()).count("linear_attention")
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    item = config.model_config.dtype.itemsize
    row = (3 * keys + values) * item + 4 * values + 8 * text.linear_num_value_heads
    return int(layers * row // ranks)


def _cached_token(config: VllmConfig, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Bytes of a token's keys and values in all attention layers of a worker."""
    cache_dtype = config.cache_config.cache_dtype
    dtype = model.dtype if cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache_dtype]
    layers = model.get_num_layers_by_block_type(parallel)
    return 2 * layers * model.get_num_kv_heads(parallel) * model.get_head_size() * dtype.itemsize


def _weights(draft: ModelConfig) -> int | None:
    """Bytes of the drafter's weights as it holds them in `draft.dtype`, by its files' headers."""
    elements = files.elements(draft.model, draft.revision)
    return None if elements is None else elements * draft.dtype.itemsize
