# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM beyond the signatures of its hooks: the table.

Files of ours below vllm_bastion, with blanks between them; below them what they rely on of one
`package.module:Class`, `package.module:Class.method`, `package.module:function` or module:

- `@names`: attributes, private ones included, that we read, set or call;
- `@calls`: methods that we call or override, as `name(first, parameters)`;
- `@why` and `@body`: pieces of the function's source that must appear in this order, and for what;
- `@beside`: our code was written beside the whole function, whose body has these fingerprints in
  each of `MINORS` (`test_contract.fingerprint` makes one from a function's tokens);
- `@needs`: the field of `Capabilities` without which vLLM does not have it.
"""

from __future__ import annotations

MINORS = ("0.32", "0.33")
SHORT = {
    "GPU": "vllm.v1.worker.gpu",
    "SPEC": "vllm.v1.worker.gpu.spec_decode",
    "SAMPLE": "vllm.v1.worker.gpu.sample",
    "SCHED": "vllm.v1.core.sched",
    "FLASH": "vllm.v1.attention.backends.flash_attn",
    "MODELS": "vllm.model_executor.models",
    "LAYERS": "vllm.model_executor.layers",
    "RUNNER": "vllm.v1.worker.gpu.model_runner",
    "STRUCTURED": "vllm.v1.structured_output",
}
TABLE = """
attention/cuda.py
  FLASH:FlashAttentionBackend @calls supports_batch_invariance(); get_impl_cls(); get_builder_cls()
  FLASH:FlashAttentionImpl @calls forward(self, layer, query, key, value, kv_cache, attn_metadata,
      output, output_scale, output_block_scale)
  FLASH:FlashAttentionMetadata @names block_table query_start_loc seq_lens
  FLASH:FlashAttentionMetadataBuilder @calls __init__(self, kv_cache_spec, layer_names, vllm_config,
      device); build(self, common_prefix_len, common_attn_metadata, fast_build)
  FLASH:FlashAttentionMetadataBuilder.build @why `fast_build` plans nothing ahead; splits are
      limited where a graph may hold the kernel
    @body self.aot_schedule and not fast_build … max_num_splits = self.max_num_splits
attention/cuda.py cpu/attention.py
  LAYERS.attention.attention:set_default_quant_scales @why a layer's scales of float8 are found
      under these names
    @body "_k_scale" … "_v_scale" … "_q_scale" … layer._k_scale_float = 1.0 … layer._v_scale_float =
      1.0
attention/graphs.py
  GPU.cudagraph_utils:CudaGraphManager @calls _init_candidates(self)
    @names _candidates _capture_descs max_num_reqs
  GPU.cudagraph_utils:CudaGraphManager.dispatch @why the first graph that fits is taken
    @body for desc in self._candidates[key] … return desc
  GPU.cudagraph_utils:_is_compatible @why a graph of plain steps does not take longer
      requests, or prompts
    @body max_query_len is not None and desc.max_query_len >= max_query_len
  GPU.cudagraph_utils:_extrapolate_full_graph_memory @why the first graph's memory is what all share
    @body mem_samples[0] … mem_samples[1]
attention/gated_delta.py
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention @names A_log _forward_method
      conv1d conv_dim dt_bias forward_cpu head_k_dim head_v_dim kv_cache num_k_heads num_v_heads
      prefix tp_size
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.__init__ @why which version of a
      layer runs is told by this
    @body self._forward_method = self.forward_c
  LAYERS.mamba.ops.cpu.gdn_attention @calls _conv_buffer_view(layer); _ssm_state_view(layer);
      _unpacked_conv_weight(layer)
engine/profile.py
  GPU.async_utils:StepTimingSample @names drafter_ms forward_ms full_cudagraph num_reqs
      num_target_tokens
  RUNNER:GPUModelRunner @names adaptive_verification cudagraph_manager device lora_config
      max_num_reqs max_num_tokens model model_config parallel_config speculator step_timing
      vllm_config
  vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin @calls _set_active_loras(self,
      prompt_lora_mapping, token_lora_mapping, lora_requests)
engine/profile.py cpu/timing.py
  GPU.async_utils:StepTimingCollector @calls collect(self); forward_start(self)
    @names _collecting _step
engine/profile.py hooks/worker.py
  RUNNER:GPUModelRunner._dummy_run @why n rows are n requests with a context of their own, and
      equal tokens
    @body context_len: int = 0 … skip_eplb: bool = False … randomize_inputs: bool = False
config.py
  vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting @beside 437e6c68 18436348
  vllm.config.speculative:SpeculativeConfig @names _maybe_override_draft_max_position_embeddings
      max_num_new_slots_for_drafting
cpu/attention.py
  vllm._custom_ops:cpu_attention_with_kv_cache @why plain rows call the op in place of the backend,
      with arguments in this order
    @body query: torch.Tensor, … key_cache: torch.Tensor, … value_cache: torch.Tensor, … output:
      torch.Tensor, … query_start_loc: torch.Tensor, … seq_lens: torch.Tensor, … scale: float, …
      causal: bool, … alibi_slopes: torch.Tensor | None, … sliding_window: int, … block_table:
      torch.Tensor, … softcap: float, … scheduler_metadata: torch.Tensor, … s_aux: torch.Tensor |
      None, … dynamic_causal: torch.Tensor | None = None, … k_scale: float = 1.0, … v_scale: float =
      1.0, … kv_cache_dtype: str = "auto",
  LAYERS.attention.attention:Attention.forward @why a backend that says so writes the cache itself
    @body not self.attn_backend.forward_includes_kv_cache_update
cpu/context_kv.py
  MODELS.qwen3_dflash:DFlashQwen3Model @calls _normalize_context_k(self, all_k);
      _project_context_kv(self, context_states, num_ctx, num_layers, num_kv_heads, head_dim)
    @names _fused_kv_bias _fused_kv_weight _hidden_norm_weight _k_norm_weights _rms_norm_eps
      _rope_cos_sin_cache
cpu/int8.py
  vllm._custom_ops @names _supports_onednn cpu_attn_reshape_and_cache create_onednn_scaled_mm
      onednn_scaled_int8_quant onednn_scaled_mm rms_norm
  torch.cpu @names _is_vnni_supported
cpu/linear.py
  vllm._custom_ops @names _supports_onednn create_onednn_mm
  vllm._custom_ops:onednn_mm @why a head calls the op itself, with room for its result
    @body output, x.reshape(-1, dnnl_handler.k), bias, dnnl_handler.handler_tensor
  LAYERS.utils:dispatch_cpu_unquantized_gemm @why a head takes oneDNN where vLLM does: unless this
      check holds
    @body check_cpu_sgl_kernel(N, K, dtype)
  torch.cpu @names _is_amx_tile_supported
cpu/stored_graphs.py
  torch._dynamo.aot_compile:AOTCompiledFunction @names _artifacts
  vllm.compilation.decorators:_try_load_aot_compiled_fn @why a loaded function must have this method
    @body ._artifacts.compiled_fn.finalize_loading(
cpu/replacements/__init__.py
  GPU.buffer_utils:UvaBackedTensor @calls copy_to_uva(self, n) @names cpu gpu
drafters/candidate_heads.py
  MODELS.qwen3_dflash2:DFlash2Qwen3ForCausalLM @calls compute_candidates(self, hidden_states)
  MODELS.lilicorr:LiLiCorrForCausalLM @calls compute_candidates(self, hidden_states)
  SPEC.dflash2.speculator:DFlash2Speculator @calls _score_candidates(self, candidate_ids,
      unary_logits, hidden_states)
  SPEC.lilicorr.speculator:LiLiCorrSpeculator @calls _score_candidates(self, candidate_ids,
      unary_logits, hidden_states)
drafters/dflash.py
  LAYERS.logits_processor:LogitsProcessor @calls forward(self, lm_head, hidden_states,
      embedding_bias, skip_gather)
  LAYERS.vocab_parallel_embedding:VocabParallelEmbedding @names org_vocab_size shard_indices tp_size
  MODELS.qwen3_dflash:DFlashQwen3ForCausalLM @names draft_id_to_target_id lm_head logits_processor
      model
  GPU.block_table:BlockTables.__init__ @why the drafter's slots are written here, [groups, token
      limit]
    @body self.slot_mappings = torch.zeros(
  GPU.input_batch:InputBatch @names cu_num_logits cu_num_logits_np has_prefill idx_mapping
      idx_mapping_np input_ids is_padding logits_indices max_query_len num_computed_tokens_np
      num_draft_tokens num_draft_tokens_per_req num_reqs num_scheduled_tokens num_tokens
      num_tokens_after_padding positions query_start_loc query_start_loc_np req_ids
  SPEC.dflash.speculator:DFlashSpeculator @calls _generate_draft(self, num_reqs, num_tokens_padded,
      attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode); _run_model(self,
      num_tokens, attn_metadata, slot_mappings); _precompute_context_kv(self, start, end,
      dummy_run); compute_draft_logits(self, hidden_states, spec_step_idx); capture(self);
      propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states,
      aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature,
      seeds, dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs, is_profile);
      load_draft_model(self, target_model, target_attn_layer_names)
    @names _context_slot_mappings context_positions device draft_kv_cache_group_ids
      draft_model_config hidden_states input_buffers max_num_reqs max_num_tokens model
      num_query_per_req num_speculative_steps sample_indices seeds set_attn target_input_buffers
      temperature use_acceptance_estimator vllm_config
  SPEC.dflash.speculator:DFlashSpeculator.__init__ @why the token limit of its configuration sizes
      its buffers
    @body super().__init__(vllm_config, device) … self.max_num_tokens, self.hidden_size
  SPEC.dflash.speculator:DFlashSpeculator.propose @why is_profile runs the drafter without its graph
    @body need_eager=is_profile
    @beside 7a00c4e1 a1aa1329
drafters/dspark.py
  MODELS.qwen3_dspark:Qwen3DSparkForCausalLM @calls compute_draft_logits(self, hidden_states);
      map_draft_to_target(self, draft_ids); markov_embed(self, token_ids)
  SPEC.dspark.speculator:DSparkSpeculator @names _anchor_idx
engine/deferred.py
  torch @names _foreach_copy_
engine/budget.py
  GPU.async_utils:AsyncOutput.__init__ @why counts that were copied on the main stream have arrived
      when the output has
    @body copy_stream.wait_stream(main_stream) … self.copy_event.record(copy_stream)
  RUNNER:GPUModelRunner.prepare_inputs @beside c4b46110 ce45f241
  RUNNER @calls sort_batch_req_ids(num_tokens_per_req, draft_tokens)
  SPEC.adaptive_verification:AdaptiveVerificationManager @calls add_request(self, req_idx);
      get_num_tokens(self, num_tokens_per_req, draft_tokens); compact_batch(self,
      num_draft_tokens_per_req, num_scheduled_tokens, cu_num_logits_np); reallocate_drafts(self,
      req_ids, idx_mapping); record_confidences(self, confidence_probs, input_batch);
      batches_to_profile(self, capture_sizes); set_initial_cost_curves(self, samples);
      set_cost_curves(self, draft_curve, verify_curve)
engine/draft_tokens.py
  SPEC.utils:DraftTokensHandler.set_draft_tokens @beside 5465e777 5465e777
  GPU.states:RequestState @names all_token_ids draft_tokens last_sampled_tokens max_model_len
      max_seq_len next_prefill_tokens num_speculative_steps prefill_len prompt_len req_id_to_index
      total_len
engine/gated_delta.py
  GPU.model_states.mamba_hybrid:MambaHybridModelState @calls preprocess_state(self, input_batch,
      block_tables, kv_cache_config, num_computed_tokens)
    @names _align_mode _mamba_ctx _mamba_src_col_gpu _mamba_src_off_gpu _mamba_state_idx_gpu
  vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext @calls run_fused_precopy(self, num_reqs,
      state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping)
engine/grammar.py
  STRUCTURED.backend_types:StructuredOutputBackend @names allocate_token_bitmask
  STRUCTURED.backend_types:StructuredOutputGrammar @names is_terminated
  STRUCTURED.backend_xgrammar:XgrammarGrammar @names matcher
  STRUCTURED:StructuredOutputManager @names _get_constraint_bounds backend validate_tokens
      vllm_config
  xgrammar:GrammarMatcher @names traverse_draft_tree
engine/logprobs.py
  SAMPLE.sampler:Sampler.get_logprobs_dims @beside 08059e0c 08059e0c
engine/processors.py
  SAMPLE.bad_words:BadWordsState @calls apply(self, logits, ctx)
    @names bad_word_offsets bad_word_token_ids num_bad_words req_states
  SAMPLE.bad_words:BadWordsState.apply @beside 27cb5172 27cb5172
  SAMPLE.penalties:PenaltiesState @calls apply(self, logits, ctx)
    @names frequency_penalty output_bin_counts presence_penalty repetition_penalty use_penalty
  SAMPLE.penalties:PenaltiesState.apply @beside ec04a265 ec04a265
  SAMPLE.thinking_budget:ThinkingBudgetState @calls apply(self, logits, ctx)
    @names cached_last_end cached_last_start enabled natural_reasoning_end_token_ids
      reasoning_end_token_ids reasoning_start_token_ids req_states thinking_token_budget
      use_thinking_budget
  SAMPLE.thinking_budget:ThinkingBudgetState.apply @beside 0bb3037a 0bb3037a
engine/sampler.py
  SAMPLE.output:SamplerOutput @names logprobs_tensors num_nans num_rejected num_sampled
      sampled_token_ids
  SAMPLE.sampler:Sampler @names apply_sampling_params compute_nans get_logprobs_dims
      logits_processors logprob_token_ids_state logprobs_mode needs_logits_processing req_states
      sampling_states thinking_budget_state use_fp64_gumbel
  SAMPLE.states:SamplingStates @names num_logprobs seeds temperature
  SPEC.rejection_sampler:RejectionSampler @calls __call__(self, logits, input_batch, draft_logits,
      invalid_drafts); _verify_in_chunks(self, logits, input_batch, draft_logits, draft_sampled,
      pos, max_chunk_logits, max_num_logprobs, verify_draft_sampled); _verify(self, logits,
      draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np,
      expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled)
    @names enable_adaptive_verification sampler
  SPEC.rejection_sampler:RejectionSampler.__call__ @beside 6463beaa 6463beaa
  SPEC.rejection_sampler:RejectionSampler.__init__ @beside 2ec86a83 50e72eb5
engine/target.py
  LAYERS.attention.attention:Attention @names impl kv_cache sliding_window
  GPU.cudagraph_utils:prepare_inputs_to_capture @why FULL graphs are captured with
      `for_capture` and their longest request
    @body max_query_len=max_query_len … for_capture=full_cudagraph
  RUNNER:GPUModelRunner.execute_model @why prepare_attn binds the step before prepare_inputs places
      its rows
    @body self.model_state.prepare_attn( … **self.model_state.prepare_inputs(
    @beside 7bc3f419 2f302eae
  RUNNER:GPUModelRunner.postprocess_sampled @why compaction runs after sampling and before drafting
    @body self.model_state.postprocess_state(
  GPU.model_states.default:DefaultModelState @calls add_request(self, req_index, new_req_data);
      prepare_inputs(self, input_batch, req_states); prepare_dummy_inputs(self, num_reqs,
      num_tokens); dummy_inputs_embeds(self, num_tokens); prepare_attn(self, input_batch,
      cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture);
      custom_sampler(self, sampler); initialize_kv_cache(self, kv_cache_config, block_tables);
      postprocess_state(self, idx_mapping, num_sampled, num_computed_tokens)
  SAMPLE.sampler:Sampler.__init__ @why processors that keep state are found in this list
    @body self.logits_processors
  RUNNER:GPUModelRunner.execute_model @why a timed step's tokens are written before they are
      embedded
    @body InputBatch.make_dummy( … attn_metadata = self.model_state.prepare_attn( … inputs_embeds =
      self.model_state.dummy_inputs_embeds( … is_padding=input_batch.is_padding
engine/budget.py drafters/dflash.py
  RUNNER:GPUModelRunner.sample_tokens @why once record_confidences is called, the trees exist
    @body self.postprocess_sampled( … self.speculator.propose( … .record_confidences(
    @beside 3a52b1c8 3534013a
engine/weights.py
  MODELS.qwen3_dflash:DFlashQwen3Model @calls _build_fused_kv_buffers(self)
    @names _fused_kv_bias _fused_kv_weight _k_norm_weights
  MODELS.qwen3_dflash:DFlashQwen3ForCausalLM.load_weights @why a drafter's layers are joined when
      its weights have been loaded
    @body loader.load_weights( … self.model._build_fused_kv_buffers()
hooks/engine_args.py
  vllm.config.scheduler:SchedulerConfig @names async_scheduling max_num_active_seqs
      max_num_batched_tokens max_num_seqs scheduler_cls
  vllm.config.vllm:VllmConfig @names _get_v2_model_runner_unsupported_features num_lookahead_tokens
  vllm.config:AttentionConfig @names backend
  vllm.config.parallel:ParallelConfig @names worker_cls
  vllm.config.scheduler:SchedulerConfig.get_scheduler_cls @why the engine core builds what we name
    @body resolve_obj_by_qualname(self.scheduler_cls)
  vllm.engine.arg_utils:EngineArgs.create_engine_config @why where a step cannot hold all drafts,
      adapters are refused with this text
    @body scheduler_config.max_num_batched_tokens … decreasing num_speculative_tokens
  vllm.engine.arg_utils:EngineArgs @names max_num_batched_tokens spec_method spec_model spec_tokens
      speculative_config
  vllm.transformers_utils.repo_utils @names get_hf_file_to_dict
  argparse:ArgumentParser @names _actions
hooks/gated_delta.py
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention @names num_spec
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core_fused_norm @why one
      kernel knows nothing of our rows: the hook on it says that it cannot be used
    @body self._can_use_fused_gdn_mtp_decode(attn_metadata) … self._forward_core(
  vllm.v1.kv_cache_interface:MambaSpec @names num_speculative_blocks
  vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata @names non_spec_token_indx
      num_accepted_tokens num_actual_tokens num_prefills spec_sequence_masks spec_token_indx
hooks/grammar.py
  SCHED.scheduler:Scheduler @calls get_grammar_bitmask(self, scheduler_output);
      update_draft_token_ids(self, draft_token_ids); update_draft_token_ids_in_output(self,
      draft_token_ids, scheduler_output)
  vllm.v1.outputs:DraftTokenIds @names draft_token_ids req_ids
  vllm.v1.request:Request @names is_finished is_prefill_chunk request_id structured_output_request
  SCHED.output:GrammarOutput @names num_acceptable_drafts
  STRUCTURED.utils @calls strip_speculative_padding(token_ids)
  SCHED.scheduler:Scheduler.get_grammar_bitmask @beside 186cae8d 186cae8d
  SCHED.scheduler:Scheduler.update_draft_token_ids @beside 2ce05d3b 2ce05d3b
  SCHED.scheduler:Scheduler.update_draft_token_ids_in_output @beside f9ae37b8 f9ae37b8
  STRUCTURED:StructuredOutputManager.grammar_bitmask @beside 5407e59e e7c3948f
hooks/layers.py
  vllm.compilation.backends @names model_tag
  SPEC.dflash.utils:load_dflash_model @why the drafter's layers are known by this tag
    @body set_model_tag("dflash_head")
  SPEC.dspark.utils:load_dspark_model @why a DSpark drafter's layers are known by this tag
    @body set_model_tag("dspark_head")
hooks/requests.py
  vllm.sampling_params:SamplingParams @names all_stop_token_ids allowed_token_ids
      bad_words_token_ids logit_bias max_tokens min_tokens seed
hooks/runner.py
  RUNNER:GPUModelRunner.__init__ @why warm_up finds our manager under this name
    @body self.adaptive_verification
  RUNNER:GPUModelRunner.execute_model @why blocks are copied within it, so after our hook
    @body self.update_requests(scheduler_output)
  RUNNER:GPUModelRunner.update_requests @why the copied blocks include the drafter's
    @body scheduler_output.kv_cache_block_copies … self.kv_caches
  RUNNER:GPUModelRunner @names adaptive_verification draft_tokens_handler execute_model_state
      num_speculative_steps req_states speculator
  RUNNER:ExecuteModelState @names aux_hidden_states hidden_states input_batch
      num_spec_tokens_to_schedule
  RUNNER:GPUModelRunner.sample_tokens @why without a drafter and its steps, a step neither drafts
      nor sets draft tokens
    @body if self.speculator is not None: … self.speculator.propose( … if self.num_speculative_steps
      > 0: … self.draft_tokens_handler.set_draft_tokens(
  GPU.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask @beside cbaa23dc eb9557eb
hooks/runner.py hooks/warm_up.py
  GPU.warmup:_warmup_kernels @why a request's rows follow from these two, and the longest has four
      times as many
    @body num_spec_steps = model_runner.num_speculative_steps … prompt_len = decode_query_len + 1 …
      decode_steps.append(([0], [use_spec_decode]))
    @beside 08e5ddcd 4388dbad
hooks/scheduler.py
  SCHED.output:SchedulerOutput @names num_invalid_spec_tokens num_scheduled_tokens
      num_spec_tokens_to_schedule scheduled_new_reqs scheduled_spec_decode_tokens
      total_num_scheduled_tokens
  SCHED.interface:PauseState @names UNPAUSED
  vllm.config.parallel:ParallelConfig @names data_parallel_size
  vllm.config.compilation:CompilationConfig @names cudagraph_mode max_cudagraph_capture_size
  vllm.v1.core.block_pool:BlockPool @calls get_num_free_blocks(self)
  vllm.v1.engine.core:EngineCoreProc.run_engine_core @why data-parallel ranks of a dense model are
      engines of their own
    @body is_moe: … reconfigure_for_independent_dp_rank()
  SCHED.async_scheduler:AsyncScheduler._update_after_schedule @why a running request has its K
      placeholders before the next step
    @body scheduler_output.num_spec_tokens_to_schedule … request.spec_token_ids =
      self._spec_token_placeholders
    @beside 131e68f6 131e68f6
  vllm.config.scheduler:SchedulerConfig @names long_prefill_token_threshold
      prefill_schedule_interval
  SCHED.async_scheduler:AsyncScheduler @calls _update_request_with_output(self, request,
      new_token_ids, is_stale)
  SCHED.scheduler:Scheduler @calls add_request(self, request); make_spec_decoding_stats(self,
      spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens,
      request_id); schedule(self, throttle_prefills); shutdown(self); update_from_output(self,
      scheduler_output, model_runner_output); _handle_stopped_request(self, request);
      _update_request_with_output(self, request, new_token_ids, is_stale)
    @names dynamic_sd_lookup has_mamba_layers kv_cache_manager kv_holding_waiting log_stats
      max_model_len max_num_active_reqs max_num_running_reqs max_num_scheduled_tokens
      num_lookahead_tokens pause_state requests running scheduler_config
      structured_output_manager vllm_config waiting
  SCHED.scheduler:Scheduler.__init__ @why our methods read these
    @body self.vllm_config = vllm_config … self.log_stats … self.requests
  SCHED.scheduler:Scheduler.make_spec_decoding_stats @why vLLM subtracts them from the draft tokens
      that it counts
    @body num_draft_tokens -= num_invalid_spec_tokens.get(
    @beside 18615d33 18615d33
  SCHED.scheduler:Scheduler.schedule @why placeholders are spec_token_ids; K is what the lookup says
    @body token_budget = self.max_num_scheduled_tokens … spec.max_num_new_slots_for_drafting …
      self.running … request.num_tokens_with_spec … scheduled_spec_decode_tokens[request.request_id]
      = spec_token_ids … while token_budget > 0: … request_queue =
      self.kv_holding_waiting … self.max_num_active_reqs … self.dynamic_sd_lookup is None …
      scheduled_new_reqs.extend(scheduled_resumed_reqs) … num_spec_tokens_to_schedule =
      self.dynamic_sd_lookup[
  SCHED.scheduler:Scheduler.update_from_output @why nodes that were not verified are handed over
      under this name
    @body num_invalid_spec_tokens=scheduler_output.num_invalid
  vllm.v1.outputs:ModelRunnerOutput @names sampled_token_ids
  vllm.v1.request:Request @names max_tokens num_computed_tokens num_output_placeholders
      num_output_tokens num_tokens sampling_params spec_token_ids status use_structured_output
  vllm.v1.metrics.stats:RequestSpecDecodeMetrics @calls new(num_spec_tokens); observe(self,
      num_draft_tokens, num_accepted, detailed)
  SCHED.scheduler:Scheduler.add_request @why a request gets its metrics here
    @body request.spec_decode_metrics = RequestSpecDecodeMetrics.new(
  vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__ @why one counter for each of these
    @body speculative_config.num_speculative_tokens
  vllm.v1.spec_decode.metrics:SpecDecodingStats @names new num_draft_tokens
      num_drafts num_spec_tokens observe_draft
  vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager @names block_size req_to_blocks
  vllm.v1.core.kv_cache_manager:KVCacheManager @names block_pool coordinator
hooks/telemetry.py
  vllm.v1.metrics.loggers:PrometheusStatLogger @names _counter_cls _gauge_cls _histogram_cls
      per_engine_labelvalues
  vllm.v1.metrics.loggers:PrometheusStatLogger.__init__ @why our metrics have the same labels
    @body labelnames = ["model_name", "engine"] … self.per_engine_labelvalues
  vllm.v1.metrics.loggers:StatLoggerManager.record @why the first logger takes our entry out before
      the others see the statistics
    @body for stat_logger in self.stat_loggers: … stat_logger.record(
  vllm.v1.metrics.stats:SchedulerStats @names kv_connector_stats
hooks/worker.py
  vllm.v1.worker.gpu_worker:Worker @calls compile_or_warm_up_model(self);
      execute_dummy_batch(self); finish_weight_update(self); get_draft_model(self);
      init_device(self); reload_weights(self, args, kwargs); update_weights(self, update_info)
    @names _weight_update_active _weight_update_is_draft model_runner vllm_config
  vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch @why ours runs the same with one row
    @body _dummy_run( … uniform_decode=True … randomize_inputs=self.randomize_dummy_inputs
host.py cpu/host.py
  GPU.cudagraph_utils:CudaGraphManager @names captured_token_counts needs_capture
telemetry/prometheus.py
  prometheus_client:Histogram.observe @why many equal values are counted at once
    @body self._sum.inc(amount) … self._buckets[i].inc(1)
validate/arguments.py
  vllm.engine.arg_utils:EngineArgs @names decode_context_parallel_size enable_batch_sharded_sampling
      enable_dbo enable_elastic_ep enable_return_routed_experts pipeline_parallel_size
      prefill_context_parallel_size return_sampling_mask tensor_parallel_size ubatch_size
      watermark_config
validate/engine.py
  vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1 @names finish_forward
      save_kv_layer wait_for_save
  vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory @calls
      get_connector_class(kv_transfer_config)
"""
