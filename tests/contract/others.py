# SPDX-License-Identifier: Apache-2.0
"""What the hooks, attention layers and calibration rely on."""

from __future__ import annotations

from tests.contract.reliance import Reliance

_SPEC = "vllm.v1.worker.gpu.spec_decode"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = "vllm.v1.core.sched"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_MODELS = "vllm.model_executor.models"

OTHERS: tuple[Reliance, ...] = (
    Reliance(
        f"{_FLASH}:FlashAttentionBackend",
        files="attention/cuda.py",
        methods=("supports_batch_invariance()", "get_impl_cls()", "get_builder_cls()"),
    ),
    Reliance(
        f"{_FLASH}:FlashAttentionImpl",
        files="attention/cuda.py",
        methods=(
            (
                "forward(self, layer, query, key, value, kv_cache, attn_metadata, output, "
                "output_scale, output_block_scale)"
            ),
        ),
    ),
    Reliance(
        f"{_FLASH}:FlashAttentionMetadata",
        files="attention/cuda.py",
        names=("block_table query_start_loc seq_lens"),
    ),
    Reliance(
        f"{_FLASH}:FlashAttentionMetadataBuilder",
        files="attention/cuda.py",
        methods=(
            "__init__(self, kv_cache_spec, layer_names, vllm_config, device)",
            "build(self, common_prefix_len, common_attn_metadata, fast_build)",
        ),
    ),
    Reliance(
        f"{_FLASH}:FlashAttentionMetadataBuilder.build",
        files="attention/cuda.py",
        why="our builder switches both off, and they are read here",
        body=("self.aot_schedule", "max_num_splits = self.max_num_splits"),
    ),
    Reliance(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
        files="attention/gated_delta.py",
        names=(
            "A_log _forward_method conv1d conv_dim dt_bias forward_cpu head_k_dim "
            "head_v_dim kv_cache num_k_heads num_v_heads prefix tp_size"
        ),
    ),
    Reliance(
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        files="attention/gated_delta.py",
        names=("_conv_buffer_view _ssm_state_view _unpacked_conv_weight"),
    ),
    Reliance(
        "vllm.distributed.parallel_state:init_distributed_environment",
        files="calibration/engine.py",
        why="its world group holds all ranks that step together",
        body=("rank = parallel_config.data_parallel_rank * world_size + rank", "_WORLD = "),
    ),
    Reliance(
        "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
        files="calibration/engine.py",
        why="data-parallel ranks of a dense model are engines of their own",
        body=("is_moe:", "reconfigure_for_independent_dp_rank()"),
    ),
    Reliance(
        f"{_GPU}.cudagraph_utils:CudaGraphManager",
        files="host.py cpu/host.py",
        names=("captured_token_counts needs_capture"),
    ),
    Reliance(
        f"{_GPU}.async_utils:StepTimingCollector",
        files="calibration/measure.py cpu/timing.py",
        methods=("collect(self)", "forward_start(self)", "forward_end(self)"),
        names="_collecting _step",
    ),
    Reliance(
        f"{_GPU}.async_utils:StepTimingSample",
        files="calibration/measure.py",
        names=("drafter_ms forward_ms num_reqs num_target_tokens"),
    ),
    Reliance(
        _RUNNER,
        files="calibration/measure.py",
        methods=("_dummy_run(self, num_tokens)", "sample_tokens(self, grammar_output)"),
        names=(
            "adaptive_verification attn_groups cudagraph_manager decode_query_len device "
            "kv_cache_config max_model_len max_num_reqs max_num_tokens model model_config "
            "model_state num_speculative_steps parallel_config rejection_sampler req_states "
            "speculator step_timing vllm_config"
        ),
    ),
    Reliance(
        f"{_RUNNER}._dummy_run",
        files="calibration/measure.py hooks/worker.py",
        why="passed by name; only a uniform batch gets decode_query_len rows",
        body=(
            "uniform_decode: bool = False",
            "context_len: int = 0",
            "skip_eplb: bool = False",
            "randomize_inputs: bool = False",
            "if uniform_decode:",
            "num_tokens = max(num_tokens, self.decode_query_len)",
        ),
    ),
    Reliance(
        "vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch",
        files="hooks/worker.py",
        why="ours runs the same with one row",
        body=("_dummy_run(", "uniform_decode=True", "randomize_inputs=self.randomize_dummy_inputs"),
    ),
    Reliance(
        f"{_RUNNER}.execute_model",
        files="engine/target.py",
        why="a timed step's tokens are written before they are embedded",
        body=(
            "InputBatch.make_dummy(",
            "attn_metadata = self.model_state.prepare_attn(",
            "inputs_embeds = self.model_state.dummy_inputs_embeds(",
            "is_padding=input_batch.is_padding",
        ),
    ),
    Reliance(
        f"{_CORE}.output:CachedRequestData",
        files="calibration/tree_steps.py",
        names=("new_block_ids num_computed_tokens num_output_tokens req_ids"),
    ),
    Reliance(
        f"{_CORE}.output:NewRequestData",
        files="calibration/tree_steps.py",
        names=(
            "block_ids lora_request mm_features num_computed_tokens pooling_params "
            "prefill_token_ids prompt_token_ids req_id sampling_params"
        ),
    ),
    Reliance(
        f"{_CORE}.output:SchedulerOutput",
        files="calibration/tree_steps.py hooks/scheduler.py",
        names=(
            "finished_req_ids num_invalid_spec_tokens num_scheduled_tokens "
            "num_spec_tokens_to_schedule scheduled_cached_reqs scheduled_new_reqs "
            "scheduled_spec_decode_tokens total_num_scheduled_tokens"
        ),
    ),
    Reliance(
        "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting",
        files="config.py",
        whole_body=True,
    ),
    Reliance(
        f"{_MODELS}.qwen3_dflash:DFlashQwen3Model",
        files="engine/weights.py",
        methods=("_build_fused_kv_buffers(self)",),
        names="_fused_kv_bias _fused_kv_weight _k_norm_weights",
    ),
    Reliance(
        f"{_MODELS}.qwen3_dflash:DFlashQwen3ForCausalLM.load_weights",
        files="engine/weights.py",
        why="a drafter's layers are joined when its weights have been loaded",
        body=("loader.load_weights(", "self.model._build_fused_kv_buffers()"),
    ),
    Reliance(
        "vllm.config.scheduler:SchedulerConfig",
        files="hooks/engine_args.py",
        names=("async_scheduling max_num_active_seqs max_num_batched_tokens max_num_seqs"),
    ),
    Reliance(
        "vllm.config.vllm:VllmConfig",
        files="hooks/engine_args.py",
        names=("_get_v2_model_runner_unsupported_features num_lookahead_tokens"),
    ),
    Reliance("vllm.config:AttentionConfig", files="hooks/engine_args.py", names=("backend")),
    Reliance(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        files="hooks/engine_args.py",
        why="where a step cannot hold all drafts, adapters are refused with this text",
        body=("scheduler_config.max_num_batched_tokens", "decreasing num_speculative_tokens"),
    ),
    Reliance(
        "vllm.engine.arg_utils:EngineArgs",
        files="hooks/engine_args.py",
        names=(
            "decode_context_parallel_size enable_batch_sharded_sampling enable_dbo "
            "enable_elastic_ep enable_return_routed_experts "
            "max_num_batched_tokens pipeline_parallel_size prefill_context_parallel_size "
            "return_sampling_mask spec_method spec_model spec_tokens speculative_config "
            "ubatch_size watermark_config"
        ),
    ),
    Reliance(
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata",
        files="hooks/gated_delta.py",
        names=(
            "non_spec_token_indx num_accepted_tokens num_actual_tokens num_prefills "
            "spec_sequence_masks spec_token_indx"
        ),
    ),
    Reliance(
        "vllm.v1.worker.gpu_worker:Worker",
        files="hooks/weights.py",
        methods=("get_draft_model(self)",),
        names="_weight_update_active _weight_update_is_draft model_runner vllm_config",
    ),
    Reliance(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin",
        files="calibration/measure.py",
        methods=(
            "_set_active_loras(self, prompt_lora_mapping, token_lora_mapping, lora_requests)",
        ),
    ),
    Reliance(
        "vllm.v1.worker.gpu.kv_connector:KVConnector",
        files="calibration/tree_steps.py",
        methods=("set_disabled(self, disabled)",),
    ),
    Reliance(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        files="checks/engine.py",
        names="finish_forward save_kv_layer wait_for_save",
    ),
    Reliance(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
        files="checks/engine.py",
        methods=("get_connector_class(kv_transfer_config)",),
    ),
    Reliance(f"{_SCHEDULER}.get_grammar_bitmask", files="hooks/grammar.py", whole_body=True),
    Reliance(f"{_SCHEDULER}.update_draft_token_ids", files="hooks/grammar.py", whole_body=True),
    Reliance(
        f"{_SCHEDULER}.update_draft_token_ids_in_output", files="hooks/grammar.py", whole_body=True
    ),
    Reliance(
        "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
        files="hooks/grammar.py",
        whole_body=True,
    ),
    Reliance("vllm.compilation.backends", files="hooks/runner.py", names=("model_tag")),
    Reliance(
        f"{_RUNNER}.__init__",
        files="hooks/runner.py",
        why="warm_up finds our manager under this name",
        body=("self.adaptive_verification",),
    ),
    Reliance(
        _RUNNER,
        files="hooks/runner.py",
        names=(
            "adaptive_verification draft_tokens_handler execute_model_state num_speculative_steps "
            "req_states speculator"
        ),
    ),
    Reliance(
        f"{_GPU}.model_runner:ExecuteModelState",
        files="hooks/runner.py",
        names=(
            "aux_hidden_states hidden_states input_batch num_spec_tokens_to_schedule "
            "slot_mappings_by_layer"
        ),
    ),
    Reliance(
        f"{_RUNNER}.sample_tokens",
        files="hooks/runner.py",
        why="without a drafter and its steps, a step neither drafts nor sets draft tokens",
        body=(
            "if self.speculator is not None:",
            "self.speculator.propose(",
            "if self.num_speculative_steps > 0:",
            "self.draft_tokens_handler.set_draft_tokens(",
        ),
    ),
    Reliance(
        f"{_SPEC}.dflash.utils:load_dflash_model",
        files="hooks/runner.py",
        why="the drafter's layers are known by this tag",
        body=('set_model_tag("dflash_head")',),
    ),
    Reliance(
        f"{_SPEC}.dspark.utils:load_dspark_model",
        files="hooks/runner.py",
        why="a DSpark drafter's layers are known by this tag",
        body=('set_model_tag("dspark_head")',),
    ),
    Reliance(
        f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask",
        files="hooks/runner.py",
        whole_body=True,
    ),
    Reliance(
        f"{_GPU}.warmup:_warmup_kernels",
        files="hooks/runner.py hooks/warm_up.py",
        why="a request's rows follow from these two, and the longest has four times as many",
        body=(
            "num_spec_steps = model_runner.num_speculative_steps",
            "prompt_len = decode_query_len + 1",
            "decode_steps.append(([0], [use_spec_decode]))",
        ),
        whole_body=True,
    ),
    Reliance(
        f"{_CORE}.async_scheduler:AsyncScheduler._update_after_schedule",
        files="hooks/scheduler.py",
        why="a running request has its N placeholders before the next step",
        body=("request.spec_token_ids = self._spec_token_placeholders",),
        whole_body=True,
    ),
    Reliance(
        _SCHEDULER,
        files="hooks/scheduler.py",
        names=(
            "dynamic_sd_lookup log_stats max_num_active_reqs max_num_running_reqs "
            "max_num_scheduled_tokens num_spec_tokens requests running scheduler_config "
            "structured_output_manager vllm_config waiting"
        ),
    ),
    Reliance(
        f"{_SCHEDULER}.__init__",
        files="hooks/scheduler.py",
        why="the hooks read these",
        body=("self.vllm_config = vllm_config", "self.log_stats", "self.requests"),
    ),
    Reliance(
        f"{_SCHEDULER}.make_spec_decoding_stats",
        files="hooks/scheduler.py",
        why="vLLM subtracts them from the draft tokens that it counts",
        body=("num_draft_tokens -= num_invalid_spec_tokens.get(",),
        whole_body=True,
    ),
    Reliance(
        f"{_SCHEDULER}.schedule",
        files="hooks/scheduler.py",
        why="placeholders are spec_token_ids; without a lookup each new request gets N",
        body=(
            "token_budget = self.max_num_scheduled_tokens",
            "spec.max_num_new_slots_for_drafting",
            "self.running",
            "request.num_tokens_with_spec",
            "scheduled_spec_decode_tokens[request.request_id] = spec_token_ids",
            "self.max_num_active_reqs",
            "self.dynamic_sd_lookup is None",
            "scheduled_new_reqs.extend(scheduled_resumed_reqs)",
            "self.dynamic_sd_lookup[",
        ),
    ),
    Reliance(
        f"{_SCHEDULER}.update_from_output",
        files="hooks/scheduler.py",
        why="nodes that were not verified are handed over under this name",
        body=("num_invalid_spec_tokens=scheduler_output.num_invalid",),
    ),
    Reliance(
        "vllm.v1.outputs:DraftTokenIds",
        files="hooks/scheduler.py",
        names=("draft_token_ids req_ids"),
    ),
    Reliance(
        "vllm.v1.outputs:ModelRunnerOutput",
        files="hooks/scheduler.py",
        names=("req_ids sampled_token_ids"),
    ),
    Reliance(
        "vllm.v1.request:Request",
        files="hooks/scheduler.py",
        names=(
            "is_finished is_prefill_chunk num_computed_tokens num_output_placeholders "
            "num_tokens request_id spec_token_ids structured_output_request "
            "use_structured_output"
        ),
    ),
    Reliance(
        "vllm.v1.metrics.loggers:PrometheusStatLogger",
        files="hooks/telemetry.py",
        names="_counter_cls _gauge_cls _histogram_cls per_engine_labelvalues",
    ),
    Reliance(
        "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        files="hooks/telemetry.py",
        why="our metrics have the same labels",
        body=('labelnames = ["model_name", "engine"]', "self.per_engine_labelvalues"),
    ),
    Reliance(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        files="hooks/telemetry.py",
        why="the first logger takes our entry out before the others see the statistics",
        body=("for stat_logger in self.stat_loggers:", "stat_logger.record("),
    ),
    Reliance(
        "vllm.v1.metrics.stats:SchedulerStats",
        files="hooks/telemetry.py",
        names="kv_connector_stats",
    ),
    Reliance(
        "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
        files="hooks/tracing.py",
        methods=("new(num_spec_tokens)", "observe(self, num_draft_tokens, num_accepted, detailed)"),
    ),
    Reliance(
        f"{_SCHEDULER}.add_request",
        files="hooks/tracing.py",
        why="a request gets its metrics here",
        body=("request.spec_decode_metrics = RequestSpecDecodeMetrics.new(",),
    ),
    Reliance(
        f"{_SCHEDULER}.update_from_output",
        files="hooks/tracing.py",
        why="a request's headers travel with its outputs",
        body=("trace_headers=request.trace_headers",),
    ),
    Reliance(
        "vllm.v1.engine.output_processor:OutputProcessor.do_tracing",
        files="hooks/tracing.py",
        why="the span's attributes are given by name",
        body=("engine_core_output.trace_headers", "attributes=attributes"),
    ),
    Reliance(
        "prometheus_client:Histogram.observe",
        files="telemetry/prometheus.py",
        why="many equal values are counted at once",
        body=("self._sum.inc(amount)", "self._buckets[i].inc(1)"),
    ),
    Reliance(
        "vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__",
        files="hooks/scheduler.py",
        why="one counter for each of these",
        body=("speculative_config.num_speculative_tokens",),
    ),
    Reliance(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats",
        files="hooks/scheduler.py",
        names=(
            "new num_accepted_tokens_per_pos num_draft_tokens num_drafts num_spec_tokens "
            "observe_draft"
        ),
    ),
    Reliance(
        f"{_RUNNER}.sample",
        files="policy/cost/timing.py",
        why="a step without draft tokens never enters the rejection sampler",
        body=("input_batch.num_draft_tokens == 0",),
    ),
    Reliance("argparse:ArgumentParser", files="hooks/engine_args.py", names="_actions"),
    Reliance("torch", files="engine/deferred.py", names="_foreach_copy_"),
    Reliance(
        "vllm.config.speculative:SpeculativeConfig",
        files="config.py",
        names="_maybe_override_draft_max_position_embeddings max_num_new_slots_for_drafting",
    ),
    Reliance(
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales",
        files="attention/cuda.py cpu/attention.py",
        why="a layer's scales of float8 are found under these names",
        body=(
            '"_k_scale"',
            '"_v_scale"',
            '"_q_scale"',
            "layer._k_scale_float = 1.0",
            "layer._v_scale_float = 1.0",
        ),
    ),
    Reliance(
        "vllm.sampling_params:SamplingParams",
        files="hooks/requests.py",
        names=(
            "all_stop_token_ids allowed_token_ids bad_words_token_ids logit_bias max_tokens "
            "min_tokens seed"
        ),
    ),
    Reliance(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        files="hooks/scheduler.py",
        names="block_size req_to_blocks",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        files="hooks/scheduler.py",
        names="block_pool coordinator",
    ),
)
