# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow from an engine's configuration: its trees, and the most rows of a step.

They determine the worker's buffers, its profiling run, its warm-up and the steps that it serves.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from vllm_bastion.config import settings_of
from vllm_bastion.policy.trees import Trees

# 64 requests with 63 nodes each; 74 MiB with V = 151,936.
MOST_BITMASK_ROWS = 4096


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
    """Most roots and nodes of a step. Each has logits, which vLLM limits to 1 GiB in float32.

    A target with recurrent layers keeps the inputs of each row for its commit. Its steps with nodes
    stay within the largest CUDA graph, because no draft makes up for a step without one.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    scheduler, config = vllm_config.scheduler_config, settings_of(vllm_config)
    requests, model = scheduler.max_num_seqs, vllm_config.model_config
    most = get_max_chunk_logits(model.get_vocab_size())
    if model.is_hybrid:
        most = min(most, vllm_config.compilation_config.max_cudagraph_capture_size or most)
    return min(
        scheduler.max_num_batched_tokens,
        requests * (1 + config.num_speculative_tokens),
        max(requests, most),
    )


def max_bitmask_rows(vllm_config: VllmConfig) -> int:
    """Rows of the device's grammar bitmask; a step with more applies it in parts."""
    scheduler, config = vllm_config.scheduler_config, settings_of(vllm_config)
    rows = scheduler.max_num_seqs * (config.max_grammar_tokens + 1)
    return min(rows, MOST_BITMASK_ROWS)
