# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32."""

from __future__ import annotations

from vllm_bastion.versions import Capabilities

_SPEC = "vllm.v1.worker.gpu.spec_decode"
_GPU = "vllm.v1.worker.gpu"

CAPABILITIES = Capabilities(
    returns_admitted_drafts=False,
    pads_grammar_rows=False,
    stages_hidden_states=False,
    worker_requires_triton=False,
    seeds_draft_steps=False,
    absent_kernel_parameters={
        f"{_GPU}.block_table:_gather_block_tables_kernel": (
            "num_computed_tokens_ptr",
            "sliding_window_reach_ptr",
            "block_sizes_ptr",
            "MASK_SLIDING_WINDOW",
        ),
        f"{_GPU}.input_batch:_post_update_kernel": (
            "draft_tokens_ptr",
            "draft_tokens_out_ptr",
            "num_draft_tokens",
        ),
        f"{_SPEC}.dflash.speculator:_prepare_dflash_inputs_kernel": ("out_is_padding_ptr",),
        f"{_SPEC}.rejection_sampler_utils:_compute_local_logits_stats_kernel": ("num_logits",),
        f"{_SPEC}.rejection_sampler_utils:_rejection_kernel": (
            "fly_entropy_ptr",
            "fly_entropy_threshold",
            "FLY_WINDOW_SIZE",
        ),
    },
    signatures={
        f"{_GPU}.model_runner:maybe_create_adaptive_verification_manager": (
            "(enable_adaptive_verification, attn_groups, req_states, query_start_loc, "
            "num_bonus_tokens, max_total_logits, vllm_config, target_layer_names=, "
            "additional_attn_cg_support=)"
        ),
        f"{_GPU}.model_runner:StructuredOutputsWorker": (
            "(max_num_logits, vocab_size, device, mask_stride, num_bonus_tokens)"
        ),
        f"{_GPU}.warmup:_warmup_kernels": (
            "(model_runner, worker_execute_model, worker_sample_tokens)"
        ),
    },
)
