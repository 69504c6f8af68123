# SPDX-License-Identifier: Apache-2.0
"""How many rows a step that verifies trees has at most.

The worker's buffers, its profiling run, its warm-up and the steps that it serves all follow this
number, and so does what `vllm-bastion check` says of memory.
"""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_bastion.config import bastion_config

# 64 requests with 63 nodes each; 74 MiB with V = 151,936.
MOST_BITMASK_ROWS = 4096


def max_verified_rows(vllm_config: VllmConfig) -> int:
    """Most roots and nodes of a step. Each has logits, which vLLM limits to 1 GiB in float32.

    A target with recurrent layers keeps the inputs of each row for its commit. There a step with
    nodes stays within the largest CUDA graph: no draft pays for a step without one.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    scheduler, config = vllm_config.scheduler_config, bastion_config(vllm_config)
    assert config is not None
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
    scheduler, config = vllm_config.scheduler_config, bastion_config(vllm_config)
    assert config is not None
    rows = scheduler.max_num_seqs * (config.max_grammar_tokens + 1)
    return min(rows, MOST_BITMASK_ROWS)
