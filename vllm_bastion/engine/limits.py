# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow from an engine's configuration: its trees, and the most rows of a step.

They determine the worker's buffers, its profiling run, its warm-up and the steps that it serves.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from vllm_bastion.config import settings_of
from vllm_bastion.policy.trees import Trees


def make_trees(vllm_config: VllmConfig, device: torch.device) -> Trees:
    """Allocate the trees of an engine."""
    config, scheduler = settings_of(vllm_config), vllm_config.scheduler_config
    budget = config.bastion_budget
    return Trees(
        max_num_reqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        num_nodes=config.num_speculative_tokens,
        depth=config.bastion_gamma,
        ngram_depth=config.tree_depth,
        top_k=config.bastion_top_k,
        budget=None if budget == "adaptive" else int(budget),
        device=device,
    )


def max_verified_rows(vllm_config: VllmConfig) -> int:
    """Most roots and nodes of a step. Each has logits, which vLLM limits to 1 GiB in float32."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    scheduler, config = vllm_config.scheduler_config, settings_of(vllm_config)
    requests, vocab = scheduler.max_num_seqs, vllm_config.model_config.get_vocab_size()
    return min(
        scheduler.max_num_batched_tokens,
        requests * (1 + config.num_speculative_tokens),
        max(requests, min(max_tree_rows(vllm_config), get_max_chunk_logits(vocab))),
    )


def max_tree_rows(vllm_config: VllmConfig) -> int:
    """Most rows of a step with nodes, prompts included: those of the largest CUDA graph.

    No draft makes up for a step without a graph.
    """
    compilation, rows = (
        vllm_config.compilation_config,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return rows
    return min(rows, compilation.max_cudagraph_capture_size or rows)
