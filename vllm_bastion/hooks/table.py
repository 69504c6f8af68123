# SPDX-License-Identifier: Apache-2.0
"""The patch table: every function of vLLM that is wrapped, and what goes wrong without that.

What a wrapper does is in its docstring. What is changed without a wrapper is listed in
tests/e2e/assigned.py; tests/e2e/test_patch_table.py compares running engines with both.
"""

from __future__ import annotations

from vllm_bastion.hooks.hook import Hook

# The entry is installed on every vLLM, so that a request for the method gets our message.
ENTRY = Hook(
    target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    wrapper="engine_args:create_speculative_config",
    expects="(self, target_model_config, target_parallel_config)",
    why='the schema of SpeculativeConfig has neither method "bastion" nor its keys',
)

# Installed in every process that loads vLLM's plugins, see `hooks.apply_all`.
PLUGIN_HOOKS = (
    # the user's arguments and vLLM's configuration
    ENTRY,
    Hook(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        wrapper="engine_args:create_engine_config",
        expects="(self, usage_context=, headless=)",
        why="only the finished configuration shows what trees cannot serve",
    ),
    Hook(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        wrapper="engine_args:add_cli_args",
        expects="(parser)",
        why="the parser refuses --spec-method bastion",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        wrapper="engine_args:num_lookahead_tokens",
        expects="(self)",
        why="vLLM reserves N + 1 KV slots per request for a drafter that writes gamma + 1",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig.use_v2_model_runner",
        wrapper="engine_args:use_v2_model_runner",
        expects="(self)",
        why="vLLM selects the V1 runner on a CPU host without a Triton back end",
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig._validate_v2_model_runner",
        wrapper="engine_args:validate_v2_model_runner",
        expects="(self)",
        why="it refuses V2 without Triton",
    ),
    # requests in the front end
    Hook(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        wrapper="requests:process_inputs",
        expects=(
            "(self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, "
            "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, "
            "session_id=, kv_hints=)"
        ),
        why=(
            "V2's worker raises on sampling parameters that exceed its tables, and the engine "
            "ends; vLLM does not read a request's own budget, and a session's turn may end inside "
            "a step"
        ),
    ),
    Hook(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        wrapper="requests:validate_spec_decode",
        expects="(self, speculative_config)",
        why="it refuses min_p and logit_bias with any speculative decoding",
    ),
    # statistics
    Hook(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        wrapper="telemetry:stat_logger_manager_init",
        expects=(
            "(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, "
            "aggregate_engine_logging=, client_count=)"
        ),
        why=(
            "vLLM's statistics have no place for trees, and its plugins for loggers are loaded by "
            "the server only"
        ),
    ),
    # Model Runner V2 on a CPU host
    Hook(
        target="vllm.triton_utils.dispatcher:_rebind_kernels",
        wrapper="engine_args:rebind_kernels",
        expects="(overrides)",
        why=(
            "it calls vars() on every module's globals and breaks on llvmlite's library: on a CPU "
            "host no engine starts in a process that has imported Numba, as an earlier engine has"
        ),
    ),
)
# Installed in a worker of method "bastion", see `hooks.worker`.
WORKER_HOOKS = (
    # what models are built of
    Hook(
        target="vllm.model_executor.layers.attention.attention:get_attn_backend",
        wrapper="layers:get_attn_backend",
        expects=(
            "(head_size, dtype, kv_cache_dtype, use_mla=, has_sink=, use_sparse=, use_mm_prefix=, "
            "use_per_head_quant_scales=, attn_type=, num_heads=, has_sliding_window=)"
        ),
        why="no backend of vLLM takes a tree mask",
    ),
    Hook(
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        wrapper="layers:cpu_product",
        expects="(layer, remove_weight)",
        why=(
            "on a CPU drafting is bound by the bandwidth of weights; without matrix registers, 17 "
            "rows take oneDNN 1.7 times as long as one"
        ),
    ),
    Hook(
        target="vllm.compilation.decorators:_try_load_aot_compiled_fn",
        wrapper="layers:load_compiled",
        expects="(model, aot_compilation_path)",
        why="on a CPU the stored function has no `finalize_loading`, so every start compiles",
    ),
    # the model runner
    Hook(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        wrapper="runner:init_speculator",
        expects="(vllm_config, device, req_states)",
        why="the speculator is chosen by a closed if/elif over the methods",
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:init_model_state",
        wrapper="runner:init_model_state",
        expects="(vllm_config, model, encoder_cache, device)",
        why="the class follows from the model, not from the speculative method",
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager",
        wrapper="runner:create_manager",
        expects=(
            "(enable_adaptive_verification, attn_groups, req_states, query_start_loc, "
            "num_bonus_tokens, max_total_logits, vllm_config, target_layer_names=, "
            "additional_attn_cg_support=, copy_admitted_drafts_to_host=)"
        ),
        why="vLLM's manager ranks positions of a chain by confidence",
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:resolve_adaptive_cudagraph_mode",
        wrapper="runner:resolve_cudagraph_mode",
        expects="(mode, piecewise_capture_available)",
        why="it asserts FULL graphs; an eager engine, and every CPU engine, has none",
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:ModelCudaGraphManager",
        wrapper="runner:cudagraph_manager",
        expects=(
            "(vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=, "
            "varlen_decode=, ubatch_runner=)"
        ),
        why="a FULL graph holds the tree kernel, which plain steps need not run",
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:StructuredOutputsWorker",
        wrapper="runner:structured_outputs_worker",
        expects="(max_num_logits, vocab_size, device, mask_stride)",
        why="a bitmask for N drafts per request is 10 GB at N = 512, 1024 requests and V = 152k",
    ),
    # its warm-up
    Hook(
        target="vllm.v1.worker.gpu.warmup:_warmup_kernels",
        wrapper="runner:warm_up_kernels",
        expects="(model_runner, worker_execute_model, worker_sample_tokens, greedy=)",
        why=(
            "its requests grow by four times N + 1 rows, so with a large N they exceed the "
            "model's length: their blocks are written into another request's row or past the "
            "table. All of them verify N drafts at once, whose logits take more memory than any "
            "step served"
        ),
    ),
)
# Installed in a worker whose target has gated delta layers, too.
GATED_DELTA_HOOKS = (
    Hook(
        target="vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
        wrapper="gated_delta:get_kv_cache_spec",
        expects="(self, vllm_config)",
        why=(
            "it allocates a state for each of N draft tokens, and N more inputs of the convolution"
        ),
    ),
    Hook(
        target="vllm.platforms.interface:Platform._align_hybrid_block_size",
        wrapper="gated_delta:align_block_size",
        expects="(cls, vllm_config, backend_cls)",
        why="it makes attention's pages as large as a state with N more inputs",
    ),
    Hook(
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
        wrapper="gated_delta:cpu_gdn_attention",
        expects="(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)",
        why="with one state per request it only serves rows without drafts",
    ),
    Hook(
        target=(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core"
        ),
        wrapper="gated_delta:forward_core",
        expects="(self, mixed_qkv, b, a, core_attn_out)",
        why="it treats drafts as a chain, and stores a state after each of them",
    ),
    Hook(
        target=(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode"
        ),
        wrapper="gated_delta:can_use_fused_decode",
        expects="(self, attn_metadata)",
        why="it selects a kernel for up to 8 states per request that bypasses _forward_core",
    ),
)
HOOKS: tuple[Hook, ...] = PLUGIN_HOOKS + WORKER_HOOKS + GATED_DELTA_HOOKS
