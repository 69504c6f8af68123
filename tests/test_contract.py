# SPDX-License-Identifier: Apache-2.0
"""What the runner adapters assume of vLLM beyond the signatures in the ledger.

Each entry is something an adapter reads, overrides or is called by. On a vLLM where one is gone the
test names it, and the file to look at, instead of an engine failing somewhere inside a step.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import io
import textwrap
import tokenize
from typing import get_args, get_type_hints

import pytest
import torch
from packaging.specifiers import SpecifierSet
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_bastion import compat
from vllm_bastion.versions import capabilities, capabilities_of

_PROJECTION = ["self", "context_states", "num_ctx", "num_layers", "num_kv_heads", "head_dim"]
_PROCESSOR = ("engine/processors.py", {"apply": ["self", "logits", "ctx"]})

# class -> (adapter that relies on it, its methods and their parameters)
METHODS = {
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": (
        "engine/target.py",
        {
            "add_request": ["self", "req_index", "new_req_data"],
            "prepare_inputs": ["self", "input_batch", "req_states"],
            "prepare_dummy_inputs": ["self", "num_reqs", "num_tokens"],
            "prepare_attn": [
                "self",
                "input_batch",
                "cudagraph_mode",
                "block_tables",
                "slot_mappings",
                "attn_groups",
                "kv_cache_config",
                "for_capture",
            ],
            "custom_sampler": ["self", "sampler"],
            "initialize_kv_cache": ["self", "kv_cache_config", "block_tables"],
            "postprocess_state": ["self", "idx_mapping", "num_sampled", "num_computed_tokens"],
        },
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator": (
        "drafters/dflash.py",
        {
            "_generate_draft": [
                "self",
                "num_reqs",
                "num_tokens_padded",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
                "cudagraph_runtime_mode",
            ],
            "_run_model": ["self", "num_tokens", "attn_metadata", "slot_mappings"],
            "_build_uniform_attn_metadata": ["self"],
            "compute_draft_logits": ["self", "hidden_states", "spec_step_idx"],
            "capture": ["self"],
            "propose": [
                "self",
                "input_batch",
                "attn_metadata",
                "slot_mappings",
                "last_hidden_states",
                "aux_hidden_states",
                "num_sampled",
                "num_rejected",
                "last_sampled",
                "next_prefill_tokens",
                "temperature",
                "seeds",
                "dp_sync_state",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "mm_inputs",
                "is_profile",
            ],
            "load_draft_model": ["self", "target_model", "target_attn_layer_names"],
        },
    ),
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model": (
        "cpu/context_kv.py",
        {"_normalize_context_k": ["self", "all_k"], "_project_context_kv": _PROJECTION},
    ),
    "vllm.v1.worker.gpu.sample.penalties:PenaltiesState": _PROCESSOR,
    "vllm.v1.worker.gpu.sample.bad_words:BadWordsState": _PROCESSOR,
    "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState": _PROCESSOR,
    "vllm.model_executor.layers.logits_processor:LogitsProcessor": (
        "drafters/dflash.py",
        {"forward": ["self", "lm_head", "hidden_states", "embedding_bias", "skip_gather"]},
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend": (
        "attention/cuda.py",
        {"supports_batch_invariance": [], "get_impl_cls": [], "get_builder_cls": []},
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder": (
        "attention/cuda.py",
        {
            "__init__": ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"],
            "build": ["self", "common_prefix_len", "common_attn_metadata", "fast_build"],
        },
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
        "attention/cuda.py",
        {
            "forward": [
                "self",
                "layer",
                "query",
                "key",
                "value",
                "kv_cache",
                "attn_metadata",
                "output",
                "output_scale",
                "output_block_scale",
            ]
        },
    ),
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager": (
        "engine/verification.py",
        {
            "add_request": ["self", "req_idx"],
            "get_num_tokens": ["self", "num_tokens_per_req", "draft_tokens"],
            "compact_batch": [
                "self",
                "num_draft_tokens_per_req",
                "num_scheduled_tokens",
                "cu_num_logits_np",
            ],
            "reallocate_drafts": ["self", "req_ids", "idx_mapping"],
            "record_confidences": ["self", "confidence_probs", "input_batch"],
            "batches_to_profile": ["self", "capture_sizes"],
            "set_initial_cost_curves": ["self", "samples"],
        },
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler": (
        "engine/sampler.py",
        {
            "__call__": ["self", "logits", "input_batch", "draft_logits", "invalid_drafts"],
            "_verify_in_chunks": [
                "self",
                "logits",
                "input_batch",
                "draft_logits",
                "draft_sampled",
                "pos",
                "max_chunk_logits",
                "max_num_logprobs",
                "verify_draft_sampled",
            ],
            "_verify": [
                "self",
                "logits",
                "draft_logits",
                "draft_sampled",
                "pos",
                "cu_num_logits",
                "idx_mapping",
                "idx_mapping_np",
                "expanded_idx_mapping",
                "expanded_local_pos",
                "seq_lens_upper_bound_np",
                "verify_draft_sampled",
            ],
        },
    ),
    "vllm.v1.worker.gpu.async_utils:StepTimingCollector": (
        "calibration/measure.py",
        {"collect": ["self"], "forward_start": ["self"], "forward_end": ["self"]},
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "calibration/measure.py",
        {"_dummy_run": ["self", "num_tokens"], "sample_tokens": ["self", "grammar_output"]},
    ),
}

# dataclass -> (adapter, fields read or replaced)
FIELDS = {
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        "drafters/dflash.py",
        {
            "num_reqs",
            "num_tokens",
            "num_tokens_after_padding",
            "idx_mapping",
            "idx_mapping_np",
            "num_scheduled_tokens",
            "num_draft_tokens_per_req",
            "query_start_loc",
            "query_start_loc_np",
            "num_computed_tokens_np",
            "prefill_len_np",
            "has_prefill",
            "positions",
            "input_ids",
            "logits_indices",
            "cu_num_logits",
            "cu_num_logits_np",
            "max_query_len",
        },
    ),
    "vllm.config:AttentionConfig": ("hooks/engine_args.py", {"backend"}),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": (
        "attention/cuda.py",
        {"query_start_loc", "seq_lens", "block_table"},
    ),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": (
        "engine/sampler.py",
        {"sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"},
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "calibration/tree_steps.py",
        {"req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens"}
        | {"mm_features", "pooling_params", "lora_request", "prefill_token_ids"},
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "calibration/tree_steps.py",
        {"req_ids", "num_computed_tokens", "num_output_tokens", "new_block_ids"},
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "calibration/tree_steps.py",
        {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"}
        | {"total_num_scheduled_tokens", "scheduled_spec_decode_tokens"}
        | {"num_spec_tokens_to_schedule"},
    ),
    "vllm.v1.worker.gpu.async_utils:StepTimingSample": (
        "calibration/measure.py",
        {"forward_ms", "drafter_ms", "num_target_tokens", "num_reqs"},
    ),
}

# function of vLLM -> (adapter, source text its behaviour here rests on)
SOURCE = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled": (
        "engine/target.py: compaction must run after sampling and before drafting",
        ["self.model_state.postprocess_state("],
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": (
        "engine/verification.py: trees are known to exist once record_confidences is called",
        ["self.postprocess_sampled(", "self.speculator.propose(", ".record_confidences("],
    ),
    "vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__": (
        "engine/lagged.py: counts copied on the main stream are there when the output is",
        ["copy_stream.wait_stream(main_stream)", "self.copy_event.record(copy_stream)"],
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": (
        "engine/target.py: prepare_attn binds the step before prepare_inputs places its rows",
        ["self.model_state.prepare_attn(", "**self.model_state.prepare_inputs("],
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample": (
        "policy/cost/timing.py: a step without draft tokens never enters the rejection sampler",
        ["input_batch.num_draft_tokens == 0"],
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": (
        "hooks/runner.py: warm_up finds our manager under this name",
        ["self.adaptive_verification"],
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run": (
        "calibration/measure.py: dummy_tree_step names both",
        ["context_len: int = 0", "skip_eplb: bool = False"],
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build": (
        "attention/cuda.py: what its builder switches off is asked for here",
        ["self.aot_schedule", "max_num_splits = self.max_num_splits"],
    ),
    "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture": (
        "engine/target.py: FULL graphs are captured with mode NONE, told by for_capture",
        ["CUDAGraphMode.NONE", "for_capture=full_cudagraph"],
    ),
    "vllm.distributed.parallel_state:init_distributed_environment": (
        "calibration/engine.py: its world group has all ranks that step together",
        ["rank = parallel_config.data_parallel_rank * world_size + rank", "_WORLD = "],
    ),
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core": (
        "calibration/engine.py: but data-parallel ranks of a dense model are engines of their own",
        ["is_moe:", "reconfigure_for_independent_dp_rank()"],
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__": (
        "engine/target.py: processors that keep state of their own are found in this list",
        ["self.logits_processors"],
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (
        "hooks/scheduler.py: placeholders are the running requests' spec_token_ids, charged "
        "nothing beyond; without a lookup a request is padded with N of them on admission",
        [
            "token_budget = self.max_num_scheduled_tokens",
            "spec.max_num_new_slots_for_drafting",
            "self.running",
            "request.num_tokens_with_spec",
            "scheduled_spec_decode_tokens[request.request_id] = spec_token_ids",
            "self.max_num_active_reqs",
            "self.dynamic_sd_lookup is None",
            "scheduled_new_reqs.extend(scheduled_resumed_reqs)",
            "self.dynamic_sd_lookup[",
        ],
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
        "hooks/scheduler.py: a running request has its N placeholders before the next step",
        ["request.spec_token_ids = self._spec_token_placeholders"],
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__": (
        "drafters/dflash.py: the token limit of the config it is given sizes its buffers",
        ["super().__init__(vllm_config, device)", "self.max_num_tokens, self.hidden_size"],
    ),
    "vllm.v1.worker.gpu.block_table:BlockTables.__init__": (
        "drafters/dflash.py: the drafter's slots are written here, [groups, token limit]",
        ["self.slot_mappings = torch.zeros("],
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose": (
        "drafters/dflash.py: is_profile runs the drafter without its graph",
        ["need_eager=is_profile"],
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.utils:load_dflash_model": (
        "hooks/runner.py: the drafter's layers are told from the target's by this tag",
        ['set_model_tag("dflash_head")'],
    ),
}


_SPEC = "vllm.v1.worker.gpu.spec_decode"
_SAMPLE = "vllm.v1.worker.gpu.sample"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU = "vllm.v1.worker.gpu"
_CORE = "vllm.v1.core.sched"

# function of vLLM -> adapter that was written beside its body. No signature says what a body passes
# and expects. Each version's fingerprints are in `vllm_bastion.versions`; where one differs, read
# the change beside the adapter, then note the fingerprint that the test prints.
BODIES = {
    f"{_RUNNER}.prepare_inputs": "engine/verification.py",
    f"{_RUNNER}.execute_model": "engine/target.py",
    f"{_RUNNER}.sample_tokens": "drafters/dflash.py",
    f"{_SPEC}.dflash.speculator:DFlashSpeculator.propose": "drafters/dflash.py",
    f"{_SPEC}.rejection_sampler:RejectionSampler.__init__": "engine/sampler.py",
    f"{_SPEC}.rejection_sampler:RejectionSampler.__call__": "engine/sampler.py",
    f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask": "hooks/runner.py",
    "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": "hooks/grammar.py",
    f"{_CORE}.scheduler:Scheduler.update_draft_token_ids": "hooks/grammar.py",
    f"{_CORE}.scheduler:Scheduler.update_draft_token_ids_in_output": "hooks/grammar.py",
    f"{_CORE}.scheduler:Scheduler.get_grammar_bitmask": "hooks/grammar.py",
    f"{_SPEC}.utils:DraftTokensHandler.set_draft_tokens": "engine/draft_tokens.py",
    f"{_SAMPLE}.penalties:PenaltiesState.apply": "engine/processors.py",
    f"{_SAMPLE}.bad_words:BadWordsState.apply": "engine/processors.py",
    f"{_SAMPLE}.thinking_budget:ThinkingBudgetState.apply": "engine/processors.py",
    f"{_SAMPLE}.sampler:Sampler.get_logprobs_dims": "engine/logprobs.py",
    f"{_GPU}.warmup:_warmup_kernels": "hooks/runner.py",
    f"{_CORE}.async_scheduler:AsyncScheduler._update_after_schedule": "hooks/scheduler.py",
    f"{_CORE}.scheduler:Scheduler.make_spec_decoding_stats": "hooks/scheduler.py",
    "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting": "config.py",
}


@pytest.fixture(scope="module", autouse=True)
def _cpu_patches() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's CPU worker imports this first, too.
        import vllm.v1.worker.cpu.shm  # noqa: F401


def found(target: str) -> object:
    from vllm_bastion.hooks import resolve

    owner, name, _ = resolve(target)
    return getattr(owner, name)


@pytest.mark.parametrize(
    ("target", "name"), [(t, n) for t, (_, methods) in METHODS.items() for n in methods]
)
def test_overridden_and_called_methods(target: str, name: str) -> None:
    adapter, methods = METHODS[target]
    method = getattr(found(target), name, None)
    assert method is not None, f"vLLM's {target} lost {name}: see vllm_bastion/{adapter}"
    names = list(inspect.signature(inspect.unwrap(method)).parameters)
    expected = methods[name]
    assert names[: len(expected)] == expected, (
        f"vLLM's {target}.{name} now takes {names}: see vllm_bastion/{adapter}"
    )


@pytest.mark.parametrize("target", FIELDS)
def test_fields_that_are_read(target: str) -> None:
    adapter, wanted = FIELDS[target]
    present = {f.name for f in dataclasses.fields(found(target))}  # type: ignore[arg-type]
    assert wanted <= present, f"vLLM's {target} lost {wanted - present}: see vllm_bastion/{adapter}"


@pytest.mark.parametrize("target", SOURCE)
def test_the_order_of_calls(target: str) -> None:
    reason, lines = SOURCE[target]
    source = inspect.getsource(inspect.unwrap(found(target)))  # type: ignore[arg-type]
    at = [source.find(line) for line in lines]
    assert -1 not in at and at == sorted(at), f"vLLM's {target} has changed ({reason})"


def unpacked(caller: object, callee: str) -> int:
    """How many values `caller` takes from its call of a method `callee`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(caller))))  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called, target = node.value.func, node.targets[0]
            if isinstance(called, ast.Attribute) and called.attr == callee:
                return len(target.elts) if isinstance(target, ast.Tuple) else 1
    raise AssertionError(f"vLLM no longer calls {callee} there")


def test_vllm_takes_as_many_values_as_the_manager_returns() -> None:
    from vllm_bastion.engine.verification import BastionVerificationManager

    manager = object.__new__(BastionVerificationManager)
    manager.query_start_loc = torch.zeros(2, dtype=torch.int32)
    given = manager._reallocated(torch.zeros(2, dtype=torch.int32), 0)
    caller = found("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs")
    assert unpacked(caller, "reallocate_drafts") == len(given), "see engine/verification.py"
    assert unpacked(caller, "compact_batch") == 2, "see engine/verification.py"


def fingerprint(function: object) -> str:
    """Of a function's tokens, so that comments and line breaks do not count."""
    function = getattr(function, "fget", None) or function
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))  # type: ignore[arg-type]
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
    )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type not in layout)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@pytest.mark.parametrize("target", BODIES)
def test_bodies_that_adapters_were_written_beside(target: str) -> None:
    adapter, now = BODIES[target], fingerprint(found(target))
    known = capabilities().fingerprints.get(target)
    assert now == known, f"the body of vLLM's {target} is new ({now}): see vllm_bastion/{adapter}"


def test_every_version_in_the_range_has_its_module() -> None:
    supported = SpecifierSet(compat.SUPPORTED_VLLM)
    minors = [f"0.{n}" for n in range(100) if f"0.{n}.0" in supported]
    assert minors
    for minor in minors:
        assert set(capabilities_of(minor).fingerprints) == set(BODIES)


def test_capabilities_are_those_of_the_installed_vllm() -> None:
    """Each is found here the hard way, so that a module of `versions` cannot be wrong about it."""
    bitmask = inspect.unwrap(StructuredOutputManager.grammar_bitmask)
    worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    xpress = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.xpress")
    reallocate = AdaptiveVerificationManager.reallocate_drafts
    assert dataclasses.asdict(capabilities()) == dataclasses.asdict(
        dataclasses.replace(
            capabilities(),
            has_xpress_drafter=xpress is not None,
            returns_admitted_drafts=len(get_args(get_type_hints(reallocate)["return"])) == 4,
            pads_grammar_rows="mask_stride" in bitmask.__code__.co_varnames,
            worker_requires_triton="HAS_TRITON" in vars(worker),
        )
    )
