# SPDX-License-Identifier: Apache-2.0
"""What the adapters inside the model runner rely on."""

from __future__ import annotations

from tests.contract.reliance import Reliance

_DFLASH = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_SPEC = "vllm.v1.worker.gpu.spec_decode"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_MODELS = "vllm.model_executor.models"

ADAPTERS: tuple[Reliance, ...] = (
    Reliance(
        f"{_MODELS}.qwen3_dflash:DFlashQwen3ForCausalLM",
        files="drafters/domino_model.py",
        methods=("load_weights(self, weights)",),
        names=("draft_id_to_target_id draft_model_config model_cls"),
        why="weights keep their names but for a prefix",
        body=("self.model = self.model_cls(",),
    ),
    Reliance(
        f"{_DFLASH}.__init__",
        files="drafters/domino.py",
        why="a Domino drafter sets both after it",
        body=("self.num_query_per_req = 1 + ", "self.sample_from_anchor = False"),
    ),
    Reliance(
        "vllm.transformers_utils.configs.speculators.algos:update_dflash",
        files="hooks/drafter_models.py",
        why="a Domino drafter is read as a DFlash one",
        body=('config_dict.get("sample_from_anchor", False)',),
    ),
    Reliance(
        f"{_MODELS}.qwen3_dflash2:DFlash2Qwen3ForCausalLM",
        files="drafters/candidate_heads.py",
        names=("compute_candidates"),
    ),
    Reliance(
        f"{_SPEC}.dflash2.speculator:DFlash2Speculator",
        files="drafters/candidate_heads.py",
        names=("_score_candidates"),
    ),
    Reliance(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        files="drafters/dflash.py",
        methods=("forward(self, lm_head, hidden_states, embedding_bias, skip_gather)",),
    ),
    Reliance(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        files="drafters/dflash.py",
        names=("org_vocab_size shard_indices tp_size"),
    ),
    Reliance(
        f"{_MODELS}.qwen3_dflash:DFlashQwen3ForCausalLM",
        files="drafters/dflash.py",
        names=("draft_id_to_target_id lm_head logits_processor model"),
    ),
    Reliance(
        f"{_GPU}.block_table:BlockTables.__init__",
        files="drafters/dflash.py",
        why="the drafter's slots are written here, [groups, token limit]",
        body=("self.slot_mappings = torch.zeros(",),
    ),
    Reliance(
        f"{_GPU}.input_batch:InputBatch",
        files="drafters/dflash.py",
        names=(
            "cu_num_logits cu_num_logits_np has_prefill idx_mapping idx_mapping_np "
            "input_ids is_padding logits_indices max_query_len num_computed_tokens_np "
            "num_draft_tokens num_draft_tokens_per_req num_reqs num_scheduled_tokens num_tokens "
            "num_tokens_after_padding positions prefill_len_np query_start_loc "
            "query_start_loc_np req_ids"
        ),
    ),
    Reliance(
        _DFLASH,
        files="drafters/dflash.py",
        methods=(
            (
                "_generate_draft(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, "
                "num_tokens_across_dp, cudagraph_runtime_mode)"
            ),
            "_run_model(self, num_tokens, attn_metadata, slot_mappings)",
            "_precompute_context_kv(self, start, end, dummy_run)",
            "compute_draft_logits(self, hidden_states, spec_step_idx)",
            "capture(self)",
            (
                "propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
                "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
                "temperature, seeds, dp_sync_state, dummy_run, skip_attn_for_dummy_run, "
                "mm_inputs, is_profile)"
            ),
            "load_draft_model(self, target_model, target_attn_layer_names)",
        ),
        names=(
            "_context_slot_mappings context_positions device draft_kv_cache_group_ids "
            "draft_model_config hidden_states input_buffers max_num_reqs "
            "max_num_tokens model num_query_per_req num_speculative_steps sample_indices "
            "seeds set_attn target_input_buffers temperature use_acceptance_estimator "
            "vllm_config"
        ),
    ),
    Reliance(
        f"{_DFLASH}.__init__",
        files="drafters/dflash.py",
        why="the token limit of its configuration sizes its buffers",
        body=("super().__init__(vllm_config, device)", "self.max_num_tokens, self.hidden_size"),
    ),
    Reliance(
        f"{_DFLASH}.propose",
        files="drafters/dflash.py",
        why="is_profile runs the drafter without its graph",
        body=("need_eager=is_profile",),
        whole_body=True,
    ),
    Reliance(
        f"{_MODELS}.qwen3_dspark:Qwen3DSparkForCausalLM",
        files="drafters/dspark.py",
        names=("compute_draft_logits map_draft_to_target markov_embed"),
    ),
    Reliance(
        f"{_SPEC}.dspark.speculator:DSparkSpeculator",
        files="drafters/dspark.py",
        names=("_anchor_idx"),
    ),
    Reliance(
        f"{_SPEC}.xpress.speculator:XPressSpeculator",
        files="drafters/xpress.py",
        names=("_anchor_idx num_jacobi_passes"),
        needs="has_xpress_drafter",
    ),
    Reliance(
        f"{_SPEC}.utils:DraftTokensHandler.set_draft_tokens",
        files="engine/draft_tokens.py",
        whole_body=True,
    ),
    Reliance(
        f"{_GPU}.states:RequestState",
        files="engine/draft_tokens.py",
        names=(
            "all_token_ids draft_tokens last_sampled_tokens max_model_len max_seq_len "
            "next_prefill_tokens num_speculative_steps prefill_len prompt_len req_id_to_index "
            "total_len"
        ),
    ),
    Reliance(
        "vllm.v1.structured_output.backend_types:StructuredOutputBackend",
        files="engine/grammar.py",
        names=("allocate_token_bitmask"),
    ),
    Reliance(
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar",
        files="engine/grammar.py",
        names=("is_terminated"),
    ),
    Reliance(
        "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar",
        files="engine/grammar.py",
        names=("matcher"),
    ),
    Reliance(
        "vllm.v1.structured_output:StructuredOutputManager",
        files="engine/grammar.py",
        names=("_get_constraint_bounds backend validate_tokens vllm_config"),
    ),
    Reliance("xgrammar:GrammarMatcher", files="engine/grammar.py", names=("traverse_draft_tree")),
    Reliance(
        f"{_GPU}.async_utils:AsyncOutput.__init__",
        files="engine/lagged.py",
        why="counts that were copied on the main stream have arrived when the output has",
        body=("copy_stream.wait_stream(main_stream)", "self.copy_event.record(copy_stream)"),
    ),
    Reliance(
        f"{_SAMPLE}.sampler:Sampler.get_logprobs_dims", files="engine/logprobs.py", whole_body=True
    ),
    Reliance(
        f"{_SAMPLE}.bad_words:BadWordsState",
        files="engine/processors.py",
        methods=("apply(self, logits, ctx)",),
        names=("bad_word_offsets bad_word_token_ids num_bad_words req_states"),
    ),
    Reliance(
        f"{_SAMPLE}.bad_words:BadWordsState.apply", files="engine/processors.py", whole_body=True
    ),
    Reliance(
        f"{_SAMPLE}.penalties:PenaltiesState",
        files="engine/processors.py",
        methods=("apply(self, logits, ctx)",),
        names=(
            "frequency_penalty output_bin_counts presence_penalty repetition_penalty use_penalty"
        ),
    ),
    Reliance(
        f"{_SAMPLE}.penalties:PenaltiesState.apply", files="engine/processors.py", whole_body=True
    ),
    Reliance(
        f"{_SAMPLE}.thinking_budget:ThinkingBudgetState",
        files="engine/processors.py",
        methods=("apply(self, logits, ctx)",),
        names=(
            "cached_last_end cached_last_start enabled natural_reasoning_end_token_ids "
            "reasoning_end_token_ids reasoning_start_token_ids req_states "
            "thinking_token_budget use_thinking_budget"
        ),
    ),
    Reliance(
        f"{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply",
        files="engine/processors.py",
        whole_body=True,
    ),
    Reliance(
        f"{_SAMPLE}.output:SamplerOutput",
        files="engine/sampler.py",
        names=("logprobs_tensors num_nans num_rejected num_sampled sampled_token_ids"),
    ),
    Reliance(
        f"{_SAMPLE}.sampler:Sampler",
        files="engine/sampler.py",
        names=(
            "apply_sampling_params compute_nans get_logprobs_dims logits_processors "
            "logprob_token_ids_state logprobs_mode needs_logits_processing req_states "
            "sampling_states thinking_budget_state use_fp64_gumbel"
        ),
    ),
    Reliance(
        f"{_SAMPLE}.states:SamplingStates",
        files="engine/sampler.py",
        names=("num_logprobs seeds temperature"),
    ),
    Reliance(
        f"{_SPEC}.rejection_sampler:RejectionSampler",
        files="engine/sampler.py",
        methods=(
            "__call__(self, logits, input_batch, draft_logits, invalid_drafts)",
            (
                "_verify_in_chunks(self, logits, input_batch, draft_logits, draft_sampled, pos, "
                "max_chunk_logits, max_num_logprobs, verify_draft_sampled)"
            ),
            (
                "_verify(self, logits, draft_logits, draft_sampled, pos, cu_num_logits, "
                "idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos, "
                "seq_lens_upper_bound_np, verify_draft_sampled)"
            ),
        ),
        names=("enable_adaptive_verification sampler"),
    ),
    Reliance(
        f"{_SPEC}.rejection_sampler:RejectionSampler.__call__",
        files="engine/sampler.py",
        whole_body=True,
    ),
    Reliance(
        f"{_SPEC}.rejection_sampler:RejectionSampler.__init__",
        files="engine/sampler.py",
        whole_body=True,
    ),
    Reliance(
        "vllm.model_executor.layers.attention.attention:Attention",
        files="engine/target.py",
        names=("impl kv_cache sliding_window"),
    ),
    Reliance(
        f"{_GPU}.cudagraph_utils:prepare_inputs_to_capture",
        files="engine/target.py",
        why="FULL graphs are captured with mode NONE and `for_capture`",
        body=("CUDAGraphMode.NONE", "for_capture=full_cudagraph"),
    ),
    Reliance(
        f"{_RUNNER}.execute_model",
        files="engine/target.py",
        why="prepare_attn binds the step before prepare_inputs places its rows",
        body=("self.model_state.prepare_attn(", "**self.model_state.prepare_inputs("),
        whole_body=True,
    ),
    Reliance(
        f"{_RUNNER}.postprocess_sampled",
        files="engine/target.py",
        why="compaction runs after sampling and before drafting",
        body=("self.model_state.postprocess_state(",),
    ),
    Reliance(
        f"{_GPU}.model_states.default:DefaultModelState",
        files="engine/target.py",
        methods=(
            "add_request(self, req_index, new_req_data)",
            "prepare_inputs(self, input_batch, req_states)",
            "prepare_dummy_inputs(self, num_reqs, num_tokens)",
            "dummy_inputs_embeds(self, num_tokens)",
            (
                "prepare_attn(self, input_batch, cudagraph_mode, block_tables, slot_mappings, "
                "attn_groups, kv_cache_config, for_capture)"
            ),
            "custom_sampler(self, sampler)",
            "initialize_kv_cache(self, kv_cache_config, block_tables)",
            "postprocess_state(self, idx_mapping, num_sampled, num_computed_tokens)",
        ),
    ),
    Reliance(
        f"{_GPU}.model_states.mamba_hybrid:MambaHybridModelState",
        files="engine/gated_delta.py",
        methods=(
            "preprocess_state(self, input_batch, block_tables, kv_cache_config, "
            "num_computed_tokens)",
        ),
        names=("_align_mode _mamba_ctx _mamba_src_col_gpu _mamba_src_off_gpu _mamba_state_idx_gpu"),
    ),
    Reliance(
        "vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext",
        files="engine/gated_delta.py",
        methods=(
            "run_fused_precopy(self, num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu, "
            "idx_mapping)",
        ),
    ),
    Reliance(
        f"{_SAMPLE}.sampler:Sampler.__init__",
        files="engine/target.py",
        why="processors that keep state are found in this list",
        body=("self.logits_processors",),
    ),
    Reliance(f"{_RUNNER}.prepare_inputs", files="engine/verification.py", whole_body=True),
    Reliance(
        f"{_RUNNER}.sample_tokens",
        files="engine/verification.py drafters/dflash.py",
        why="once record_confidences is called, the trees exist",
        body=("self.postprocess_sampled(", "self.speculator.propose(", ".record_confidences("),
        whole_body=True,
    ),
    Reliance(
        f"{_SPEC}.adaptive_verification:AdaptiveVerificationManager",
        files="engine/verification.py",
        methods=(
            "add_request(self, req_idx)",
            "get_num_tokens(self, num_tokens_per_req, draft_tokens)",
            (
                "compact_batch(self, num_draft_tokens_per_req, num_scheduled_tokens, "
                "cu_num_logits_np)"
            ),
            "reallocate_drafts(self, req_ids, idx_mapping)",
            "record_confidences(self, confidence_probs, input_batch)",
            "batches_to_profile(self, capture_sizes)",
            "set_initial_cost_curves(self, samples)",
        ),
    ),
)
