# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32."""

from __future__ import annotations

from vllm_bastion.versions import Capabilities

_SPEC = "vllm.v1.worker.gpu.spec_decode"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_CORE = "vllm.v1.core.sched"

CAPABILITIES = Capabilities(
    has_xpress_drafter=False,
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
    fingerprints={
        "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting": "437e6c68",
        f"{_CORE}.async_scheduler:AsyncScheduler._update_after_schedule": "131e68f6",
        f"{_CORE}.scheduler:Scheduler.get_grammar_bitmask": "186cae8d",
        f"{_CORE}.scheduler:Scheduler.make_spec_decoding_stats": "18615d33",
        f"{_CORE}.scheduler:Scheduler.update_draft_token_ids": "2ce05d3b",
        f"{_CORE}.scheduler:Scheduler.update_draft_token_ids_in_output": "f9ae37b8",
        "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": "5407e59e",
        f"{_RUNNER}.execute_model": "7bc3f419",
        f"{_RUNNER}.prepare_inputs": "c4b46110",
        f"{_RUNNER}.sample_tokens": "3a52b1c8",
        f"{_SAMPLE}.bad_words:BadWordsState.apply": "27cb5172",
        f"{_SAMPLE}.penalties:PenaltiesState.apply": "ec04a265",
        f"{_SAMPLE}.sampler:Sampler.get_logprobs_dims": "08059e0c",
        f"{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply": "0bb3037a",
        f"{_SPEC}.dflash.speculator:DFlashSpeculator.propose": "7a00c4e1",
        f"{_SPEC}.rejection_sampler:RejectionSampler.__call__": "6463beaa",
        f"{_SPEC}.rejection_sampler:RejectionSampler.__init__": "2ec86a83",
        f"{_SPEC}.utils:DraftTokensHandler.set_draft_tokens": "5465e777",
        f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask": "cbaa23dc",
        f"{_GPU}.warmup:_warmup_kernels": "08e5ddcd",
    },
)
