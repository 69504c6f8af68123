# SPDX-License-Identifier: Apache-2.0
"""What this package relies on inside vLLM's functions, which no signature shows.

Files of ours below vllm_bastion; below them, of a function of vLLM:

- `@why` and `@body`: pieces of its source that must appear in this order, and for what;
- `@beside`: our code was written beside the whole function, whose body has these fingerprints in
  each of `MINORS` (`test_contract.fingerprint` makes one from a function's tokens).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MINORS = ("0.32", "0.33")
_SHORT = {
    "GPU": "vllm.v1.worker.gpu", "SPEC": "vllm.v1.worker.gpu.spec_decode",
    "SAMPLE": "vllm.v1.worker.gpu.sample", "SCHED": "vllm.v1.core.sched",
    "FLASH": "vllm.v1.attention.backends.flash_attn", "MODELS": "vllm.model_executor.models",
    "LAYERS": "vllm.model_executor.layers", "RUNNER": "vllm.v1.worker.gpu.model_runner",
    "STRUCTURED": "vllm.v1.structured_output",
}  # fmt: skip
_TABLE = """
attention/cuda.py
  FLASH:FlashAttentionMetadataBuilder.build @why `fast_build` plans nothing ahead; splits are
      limited where a graph may hold the kernel @body self.aot_schedule and not fast_build …
      max_num_splits = self.max_num_splits
  FLASH:FlashAttentionMetadataBuilder.update_draft_decode_metadata @why a graph plans each of its
      replays by it @body metadata.scheduler_metadata = self._store_scheduler_metadata(
attention/cuda.py cpu/attention.py
  LAYERS.attention.attention:set_default_quant_scales @why a layer's scales of float8 are found
      under these names @body "_k_scale" … "_v_scale" … "_q_scale" … layer._k_scale_float = 1.0
      … layer._v_scale_float = 1.0
attention/graphs.py
  GPU.cudagraph_utils:CudaGraphManager.dispatch @why the first graph that fits is taken @body
      for desc in self._candidates[key] … return desc
  GPU.cudagraph_utils:_is_compatible @why a graph of plain steps does not take longer requests,
      or prompts @body max_query_len is not None and desc.max_query_len >= max_query_len
  GPU.cudagraph_utils:ModelCudaGraphManager.capture @why a graph begins with what the model that we
      hand over does first @body prepare_inputs_to_capture( … model_output = model(**model_inputs)
  RUNNER:GPUModelRunner.execute_model @why a batch with prompts has no longest request; a replay
      reads neither metadata nor inputs @body max_query_len = None …
      max_query_len=max_query_len … self.cudagraph_manager.run_fullgraph(batch_desc)
  GPU.cudagraph_utils:_extrapolate_full_graph_memory @why the first graph's memory is what all
      share @body mem_samples[0] … mem_samples[1]
attention/gated_delta.py
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.__init__ @why which version
      of a layer runs is told by this @body self._forward_method = self.forward_c
engine/profile.py hooks/worker.py
  RUNNER:GPUModelRunner._dummy_run @why n rows are n requests with a context of their own, of
      random tokens @body context_len: int = 0 … skip_eplb: bool = False … randomize_inputs: bool
      = False … self.step_timing.forward_end() … self.step_timing.drafter_start() …
      self.step_timing.drafter_end()
  RUNNER:GPUModelRunner.execute_model @why a step is timed by the runner's marks @body
      self.step_timing.record_batch( … self.step_timing.forward_start()
config.py
  vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting @beside 437e6c68
      18436348
cpu/stored_graphs.py
  vllm.compilation.decorators:_try_load_aot_compiled_fn @why a loaded function must have this
      method @body ._artifacts.compiled_fn.finalize_loading(
drafters/dflash.py drafters/graphs.py
  GPU.block_table:BlockTables.__init__ @why the drafter's slots are written here, [groups, token
      limit] @body self.slot_mappings = torch.zeros(
  SPEC.dflash.speculator:DFlashSpeculator.__init__ @why the token limit of its configuration
      sizes its buffers @body super().__init__(vllm_config, device) … self.max_num_tokens,
      self.hidden_size
  SPEC.dflash.speculator:DFlashSpeculator._prepare_graph_forward @why it stores the keys and values
      of a draft's context, for a step of n-gram drafts too @body self._precompute_context_kv(0,
  SPEC.dflash.speculator:DFlashSpeculator.propose @why is_profile runs the drafter without its
      graph @body need_eager=is_profile @beside 7a00c4e1 a1aa1329
engine/budget.py
  GPU.async_utils:AsyncOutput.__init__ @why counts that were copied on the main stream have
      arrived when the output has @body copy_stream.wait_stream(main_stream) …
      self.copy_event.record(copy_stream)
  RUNNER:GPUModelRunner.prepare_inputs @beside c4b46110 ce45f241
hooks/model_runner.py
  SPEC.utils:DraftTokensHandler.set_draft_tokens @beside 5465e777 5465e777
engine/logprobs.py
  SAMPLE.sampler:Sampler.get_logprobs_dims @beside 08059e0c 08059e0c
engine/processors.py
  SAMPLE.bad_words:BadWordsState.apply @beside 27cb5172 27cb5172
  SAMPLE.penalties:PenaltiesState.apply @beside ec04a265 ec04a265
  SAMPLE.thinking_budget:ThinkingBudgetState.apply @beside 0bb3037a 0bb3037a
engine/sampler.py
  SPEC.rejection_sampler:RejectionSampler.__call__ @beside 6463beaa 6463beaa
  SPEC.rejection_sampler:RejectionSampler.__init__ @beside 2ec86a83 50e72eb5
engine/target.py
  GPU.cudagraph_utils:prepare_inputs_to_capture @why FULL graphs are captured with `for_capture`
      and their longest request @body max_query_len=max_query_len … for_capture=full_cudagraph
  RUNNER:GPUModelRunner.execute_model @why prepare_attn binds the step before prepare_inputs
      places its rows @body self.model_state.prepare_attn( … **self.model_state.prepare_inputs(
      @beside 7bc3f419 2f302eae
  RUNNER:GPUModelRunner.postprocess_sampled @why compaction runs after sampling and before
      drafting @body self.model_state.postprocess_state(
  SAMPLE.sampler:Sampler.__init__ @why processors that keep state are found in this list @body
      self.logits_processors
  RUNNER:GPUModelRunner.execute_model @why a timed step's tokens are written before they are
      embedded @body InputBatch.make_dummy( … attn_metadata = self.model_state.prepare_attn( …
      inputs_embeds = self.model_state.dummy_inputs_embeds( … is_padding=input_batch.is_padding
engine/budget.py drafters/dflash.py
  RUNNER:GPUModelRunner.sample_tokens @why once record_confidences is called, the trees exist
      @body self.postprocess_sampled( … self.speculator.propose( … .record_confidences( @beside
      3a52b1c8 3534013a
engine/weights.py
  MODELS.qwen3_dflash:DFlashQwen3ForCausalLM.load_weights @why a drafter's layers are joined
      when its weights have been loaded @body loader.load_weights( …
      self.model._build_fused_kv_buffers()
hooks/engine_args.py
  vllm.config.scheduler:SchedulerConfig.get_scheduler_cls @why the engine core builds what we
      name @body resolve_obj_by_qualname(self.scheduler_cls)
hooks/gated_delta.py
  LAYERS.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core_fused_norm @why
      one kernel knows nothing of our rows: the hook on it says that it cannot be used @body
      self._can_use_fused_gdn_mtp_decode(attn_metadata) … self._forward_core(
hooks/grammar.py
  SCHED.scheduler:Scheduler.get_grammar_bitmask @beside 186cae8d 186cae8d
  SCHED.scheduler:Scheduler.update_draft_token_ids @beside 2ce05d3b 2ce05d3b
  SCHED.scheduler:Scheduler.update_draft_token_ids_in_output @beside f9ae37b8 f9ae37b8
  STRUCTURED:StructuredOutputManager.grammar_bitmask @beside 5407e59e e7c3948f
hooks/layers.py
  SPEC.dflash.utils:load_dflash_model @why the drafter's layers are known by this tag @body
      set_model_tag("dflash_head")
  SPEC.dspark.utils:load_dspark_model @why a DSpark drafter's layers are known by this tag @body
      set_model_tag("dspark_head")
hooks/model_runner.py
  RUNNER:GPUModelRunner.__init__ @why warm_up finds our manager under this name @body
      self.adaptive_verification
  RUNNER:GPUModelRunner.execute_model @why blocks are copied within it, so after our flush @body
      self.update_requests(scheduler_output)
  RUNNER:GPUModelRunner.gather_batch_req_state @why the step is sized by these arrays @body
      num_scheduled_tokens = np.fromiter( … idx_mapping_np = np.fromiter( … num_draft_tokens_np =
      np.fromiter( … self.adaptive_verification.get_num_tokens(
  RUNNER:GPUModelRunner.execute_model @why the rows that we return pick the graph @body
      self.gather_batch_req_state( … num_toks = batch_req_state.num_tokens
  RUNNER:GPUModelRunner.update_requests @why the copied blocks include the drafter's @body
      scheduler_output.kv_cache_block_copies … self.kv_caches
  RUNNER:GPUModelRunner.sample_tokens @why without a drafter and its steps, a step neither
      drafts nor sets draft tokens @body if self.speculator is not None: …
      self.speculator.propose( … if self.num_speculative_steps > 0: …
      self.draft_tokens_handler.set_draft_tokens(
hooks/scheduler.py
  SCHED.utils:check_stop @beside 4f5dc90b 4f5dc90b
  SCHED.scheduler:Scheduler._update_request_with_output @beside c4770fc3 0a959d49
  vllm.v1.request:Request.append_output_token_ids @why it takes many tokens at once @body
      self._all_token_ids.extend(token_ids) … self.update_block_hashes()
hooks/runner.py
  GPU.warmup:_warmup_kernels @why a request's rows follow from these two, and the longest has
      four times as many @body num_spec_steps = model_runner.num_speculative_steps … prompt_len
      = decode_query_len + 1 … decode_steps.append(([0], [use_spec_decode])) @beside 08e5ddcd
      4388dbad
hooks/scheduler.py hooks/slots.py
  vllm.v1.engine.core:EngineCoreProc.run_engine_core @why data-parallel ranks of a dense model
      are engines of their own @body is_moe: … reconfigure_for_independent_dp_rank()
  SCHED.async_scheduler:AsyncScheduler._update_after_schedule @why a running request has its K
      placeholders before the next step @body scheduler_output.num_spec_tokens_to_schedule …
      request.spec_token_ids = self._spec_token_placeholders @beside 131e68f6 131e68f6
  SCHED.scheduler:Scheduler.__init__ @why our methods read these @body self.vllm_config =
      vllm_config … self.log_stats … self.requests
  SCHED.scheduler:Scheduler.make_spec_decoding_stats @why vLLM subtracts them from the draft
      tokens that it counts @body num_draft_tokens -= num_invalid_spec_tokens.get( @beside
      18615d33 18615d33
  SCHED.scheduler:Scheduler.schedule @why placeholders are spec_token_ids; K is what the lookup
      says @body token_budget = self.max_num_scheduled_tokens …
      spec.max_num_new_slots_for_drafting … self.running … request.num_tokens_with_spec …
      scheduled_spec_decode_tokens[request.request_id] = spec_token_ids … while token_budget >
      0: … request_queue = self.kv_holding_waiting … self.max_num_active_reqs …
      self.dynamic_sd_lookup is None … scheduled_new_reqs.extend(scheduled_resumed_reqs) …
      num_spec_tokens_to_schedule = self.dynamic_sd_lookup[
  SCHED.scheduler:Scheduler.update_from_output @why nodes that were not verified are handed over
      under this name @body num_invalid_spec_tokens=scheduler_output.num_invalid
  SCHED.scheduler:Scheduler.add_request @why a request gets its metrics here @body
      request.spec_decode_metrics = RequestSpecDecodeMetrics.new(
  vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__ @why one counter for each of these @body
      speculative_config.num_speculative_tokens
hooks/telemetry.py
  vllm.v1.metrics.loggers:PrometheusStatLogger.__init__ @why our metrics have the same labels
      @body labelnames = ["model_name", "engine"] … self.per_engine_labelvalues
  vllm.v1.metrics.loggers:StatLoggerManager.record @why the first logger takes our entry out
      before the others see the statistics @body for stat_logger in self.stat_loggers: …
      stat_logger.record(
hooks/worker.py
  vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch @why ours runs the same with one row
      @body _dummy_run( … uniform_decode=True … randomize_inputs=self.randomize_dummy_inputs
telemetry/prometheus.py
  prometheus_client:Histogram.observe @why many equal values are counted at once @body
      self._sum.inc(amount) … self._buckets[i].inc(1)
"""


@dataclass(frozen=True)
class Reliance:
    """What files of ours rely on in one function of vLLM."""

    target: str
    files: str
    why: str
    body: tuple[str, ...]
    fingerprints: tuple[str, ...]


def _rows() -> list[Reliance]:
    rows = []
    for group in re.split(r"\n(?=\S)", _TABLE.strip()):
        files, *lines = re.split(r"\n  (?! )", group)
        for line in lines:
            short, *found = re.split(r"\s+@(\w+) ", " ".join(line.split()))
            field = dict(zip(found[::2], found[1::2], strict=True))
            name, rest = re.fullmatch(r"(\w+)(.*)", short).groups()  # type: ignore[union-attr]
            body = tuple(filter(None, field.pop("body", "").split(" … ")))
            made = tuple(field.pop("beside", "").split())
            why = field.pop("why", "")
            assert not field, f"{short}: {field}"
            rows.append(Reliance(_SHORT.get(name, name) + rest, files, why, body, made))
    return rows


CONTRACT = tuple(_rows())
