# SPDX-License-Identifier: Apache-2.0
"""Kernels of Model Runner V2 that have no CPU replacement, and why."""

from __future__ import annotations

_GPU = "vllm.v1.worker.gpu"

WITHOUT = {
    # options that method "bastion" refuses, or vLLM does with speculative decoding
    f"{_GPU}.sample.batch_shard": (
        "_build_shard_plan_kernel _pack_sampler_output_kernel _unpack_gathered_output_kernel "
        "_pack_logprobs_kernel _unpack_logprobs_kernel"
    ),
    f"{_GPU}.sample.watermark": (
        "_repeated_context_mask_kernel _philox_gumbel_kernel _draft_step_kernel"
    ),
    f"{_GPU}.spec_decode.acceptance_estimator": (
        "_accumulate_kernel _refit_kernel _local_max_sumexp_kernel _predict_kernel"
    ),
    f"{_GPU}.sample.output": "_compact_sampling_mask_kernel",
    # options that are refused on a CPU, see `validate_v2_model_runner`
    f"{_GPU}.model_states.prompt_embeds": "_apply_prompt_embeds_kernel",
    f"{_GPU}.sample.trace_replay": "_trace_replay_kernel",
    # other methods: how they verify, and their drafters
    f"{_GPU}.spec_decode.rejection_sampler": "_flatten_sampled_kernel _gather_draft_sampled_kernel",
    f"{_GPU}.spec_decode.rejection_sampler_utils": (
        "_compute_local_logits_stats_kernel _rejection_kernel _resample_kernel "
        "_insert_resampled_kernel _compute_cumulative_log_p_kernel "
        "_compute_local_residual_mass_kernel"
    ),
    f"{_GPU}.spec_decode.dflash2.speculator": "_selector_walk_kernel _cache_draft_logits_kernel",
    f"{_GPU}.spec_decode.multi_module_mtp.speculator": (
        "_prepare_input_buffers_kernel _prepare_input_hidden_states_and_embeddings_kernel "
        "_pad_trailing_draft_slots_kernel _cache_inputs_kernel _shift_input_ids_kernel "
        "_shift_input_embeds_kernel"
    ),
    f"{_GPU}.spec_decode.ngram.speculator": "_ngram_scan_kernel _ngram_finalize_kernel",
    f"{_GPU}.spec_decode.xpress.kernels": (
        "_xpress_latent_kernel _xpress_add_argmax_partial_kernel "
        "_xpress_add_argmax_reduce_to_blk_kernel _xpress_topc_argmax_to_blk_kernel"
    ),
    f"{_GPU}.spec_decode.standalone_ar.speculator": "_prepare_prefill_inputs_kernel",
    f"{_GPU}.spec_decode.target_dependent_ar.speculator": (
        "_prepare_prefill_inputs_kernel _prepare_decode_inputs_kernel _update_draft_inputs_kernel"
    ),
    # decode context parallelism, which vLLM's attention for CPUs does not support
    f"{_GPU}.cp_utils": "_dcp_local_seq_lens_kernel",
    # CUDA devices only, and Model Runner V1
    "vllm.v1.worker.mamba_utils": (
        "get_aligned_state_indices_multi_group_kernel batch_memcpy_kernel"
    ),
    # other recurrent layers with prefix caching
    f"{_GPU}.model_states.recoverssm": "_postprocess_recoverssm_align_kernel",
}
"""Module -> the kernels that it launches. Some are in vLLM 0.33 only."""
