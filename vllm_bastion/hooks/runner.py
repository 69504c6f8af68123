# SPDX-License-Identifier: Apache-2.0
"""Hooks that only a worker of method "bastion" installs.

`hooks.worker.install_adapters` installs them, later than the rest: the model runner must not be
imported before the platform has applied its own patches. Functions that
`vllm.v1.worker.gpu.model_runner` imported by name are wrapped there, where they are looked up. Each
wrapper checks the config it is given, so an engine without bastion in the same process gets the
originals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import numpy as np

from vllm_bastion.carriers import StepPlan
from vllm_bastion.checkpoints.kinds import KINDS, kind_of
from vllm_bastion.config import BastionSpeculativeConfig, bastion_config, is_lagged
from vllm_bastion.hooks.ledger import BASTION_WORKER, Hook
from vllm_bastion.platform import current_host

_RUNNER = "vllm.v1.worker.gpu.model_runner"

RUNNER_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="vllm.model_executor.layers.attention.attention:get_attn_backend",
        wrapper="runner:get_attn_backend",
        expects=(
            "(head_size, dtype, kv_cache_dtype, use_mla=, has_sink=, use_sparse=, use_mm_prefix=, "
            "use_per_head_quant_scales=, attn_type=, num_heads=, has_sliding_window=)"
        ),
        why="no backend of vLLM takes a tree mask",
        what="the target's layers get ours; the drafter's keep vLLM's",
        upstream="a tree-capable backend",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        wrapper="runner:cpu_product",
        expects="(layer, remove_weight)",
        why=(
            "on a CPU drafting is bound by the bandwidth of weights; without matrix registers, "
            "17 rows take oneDNN 1.7 times as long as one"
        ),
        what=(
            "the drafter's layers multiply in int8 (`bastion_drafter_weights`); without matrix "
            "registers, other layers use our bf16 product; a head reuses the memory of its logits"
        ),
        upstream="online int8 quantisation of a drafter on a CPU; a product for few rows",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.model_executor.layers.logits_processor:_topk",
        wrapper="runner:top_k",
        expects="(scores, k)",
        why="PyTorch's top-k of a vocabulary takes three times as long as ours on a CPU",
        what="a drafter's candidates are ranked by ours there",
        upstream="a faster top-k on a CPU",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.compilation.decorators:_try_load_aot_compiled_fn",
        wrapper="runner:load_compiled",
        expects="(model, aot_compilation_path)",
        why="on a CPU the stored function has no `finalize_loading`, so every start compiles",
        what="loads such a function, which is complete without it",
        upstream="vLLM checks whether the function has it",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:init_speculator",
        wrapper="runner:init_speculator",
        expects="(vllm_config, device, req_states)",
        why="the speculator is chosen by a closed if/elif over the methods",
        what="builds the drafter's kind of BastionSpeculator",
        upstream="a registry of speculators",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:init_model_state",
        wrapper="runner:init_model_state",
        expects="(vllm_config, model, encoder_cache, device)",
        why="the class follows from the model, not from the speculative method",
        what="builds BastionModelState",
        upstream="a registry of model states",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:maybe_create_adaptive_verification_manager",
        wrapper="runner:create_manager",
        expects=(
            "(enable_adaptive_verification, attn_groups, req_states, query_start_loc, "
            "num_bonus_tokens, max_total_logits, vllm_config, target_layer_names=, "
            "additional_attn_cg_support=, copy_admitted_drafts_to_host=)"
        ),
        why="vLLM's manager ranks positions of a chain by confidence",
        what="builds TreeBudgetManager, which ranks the nodes of trees",
        upstream="a seam for other managers",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:resolve_adaptive_cudagraph_mode",
        wrapper="runner:resolve_cudagraph_mode",
        expects="(mode, piecewise_capture_available)",
        why="it asserts FULL graphs; an eager engine, and every CPU engine, has none",
        what="leaves such a mode as it is",
        upstream="adaptive verification without graphs",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:ModelCudaGraphManager",
        wrapper="runner:cudagraph_manager",
        expects=(
            "(vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=, "
            "varlen_decode=, ubatch_runner=)"
        ),
        why="a FULL graph holds the tree kernel, which plain steps need not run",
        what="builds BastionCudaGraphManager, which has graphs for plain steps too",
        upstream="adaptive verification captures plain steps",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:StructuredOutputsWorker",
        wrapper="runner:structured_outputs_worker",
        expects="(max_num_logits, vocab_size, device, mask_stride)",
        why="a bitmask for N drafts per request is 10 GB at N = 512, 1024 requests and V = 152k",
        what="builds SharedBitmask, which has at most 4096 rows",
        upstream="a per-request number of speculative tokens",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:GPUModelRunner.execute_model",
        wrapper="runner:execute_model",
        expects=(
            "(self, scheduler_output, intermediate_tensors=, dummy_run=, skip_attn_for_dummy_run=, "
            "is_profile=, context_len=, valid_dummy_state_slots=, randomize_inputs=)"
        ),
        why="a grammar may reject nodes of a tree that the worker already has; vLLM copies whole "
        "blocks, in which rows of the drafter may be missing until they are stored",
        what="removes these nodes, and stores these rows, before the step",
        upstream="draft tokens with parents",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:DraftTokensHandler",
        wrapper="runner:draft_tokens_handler",
        expects="(device=)",
        why="the engine core checks drafts against grammars, but does not know the drafts' parents",
        what="sends parents with the tokens",
        upstream="draft tokens with parents",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras",
        wrapper="runner:set_active_loras",
        expects="(self, prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type=)",
        why="it maps scheduled rows to adapters; a trimmed step has fewer, and a logit per node",
        what="maps the step's own rows and logits",
        upstream="adaptive verification with LoRA",
        when=BASTION_WORKER,
    ),
    Hook(
        target=f"{_RUNNER}:GPUModelRunner.sample_tokens",
        wrapper="runner:sample_tokens",
        expects="(self, grammar_output)",
        why="only the worker knows how many nodes were verified; vLLM 0.33's warm-up sends bitmask "
        "rows for N drafts per request",
        what="attaches the counts, and whether steps draft, to the output for the scheduler; "
        "drops the rows beyond 63 drafts",
        upstream="adaptive verification reports what it verified",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch",
        wrapper="worker:execute_dummy_batch",
        expects="(self)",
        why="an idle data-parallel rank of a mixture of experts runs N + 1 rows, and other ranks' "
        "steps are padded to as many",
        what="runs one row, and a draft for it",
        upstream="a dummy batch of one row",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.reload_weights",
        wrapper="weights:reload_weights",
        expects="(self, *args, **kwargs)",
        why="vLLM does not know of copies: a head's packed weight, a drafter's joined weights",
        what="renews them after vLLM has written new weights in place",
        upstream="a callback after weights have changed",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.update_weights",
        wrapper="weights:update_weights",
        expects="(self, update_info)",
        why="a drafter's layers must get a drafter's products, and vLLM joins "
        "their weights while some are missing",
        what="loads a drafter's weights as at the start",
        upstream="a callback after weights have changed",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
        wrapper="weights:finish_weight_update",
        expects="(self)",
        why="as for reload_weights, where a trainer sends weights",
        what="renews the copies",
        upstream="a callback after weights have changed",
        when=BASTION_WORKER,
    ),
)


def get_attn_backend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A tree-capable backend for a target layer; vLLM's own for a drafter's."""
    backend, (_, config) = original(*args, **kwargs), _current_config()
    if config is None or _builds_drafter():
        return backend
    return current_host().tree_backend(
        backend, kwargs.get("kv_cache_dtype", args[2] if len(args) > 2 else None)
    )


def _current_config() -> tuple[Any, BastionSpeculativeConfig | None]:
    """vLLM's current configuration, and its settings of method "bastion"; None without."""
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    return vllm_config, bastion_config(vllm_config)


def _builds_drafter() -> bool:
    """Whether the model that is being built is a drafter: vLLM builds them under these tags."""
    from vllm.compilation import backends

    return backends.model_tag in {f"{kind.method}_head" for kind in KINDS}


def cpu_product(original: Callable[..., Any], layer: Any, remove_weight: bool) -> Any:
    """int8 for a linear layer of a drafter; our bf16 product for others, where it is faster."""
    _, config = _current_config()
    if config is None:
        return original(layer, remove_weight)
    installed = current_host().install_product(
        layer,
        drafter_weights=config.bastion_drafter_weights,
        in_drafter=_builds_drafter(),
        remove_weight=remove_weight,
    )
    return None if installed else original(layer, remove_weight)


def top_k(original: Callable[..., Any], scores: Any, k: int) -> Any:
    """Ours on a CPU."""
    return current_host().top_k(scores, k, original)


def init_speculator(
    original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any
) -> Any:
    """BastionSpeculator, or the one for the drafter's kind, in place of vLLM's."""
    from vllm_bastion.engine.runtime import make_runtime

    spec_config = bastion_config(vllm_config)
    if spec_config is None:
        return original(vllm_config, device, req_states)
    kind = kind_of(spec_config.draft_model_config.architectures)
    assert kind is not None  # checked by the validation
    speculator = resolve_name(kind.speculator)
    return speculator(make_runtime(vllm_config, device), vllm_config, device, req_states)


def load_compiled(original: Callable[..., Any], model: Any, aot_compilation_path: str) -> Any:
    """Load what an earlier start compiled, also on a CPU."""
    if bastion_config(model.vllm_config) is None:
        return original(model, aot_compilation_path)
    with current_host().loading_compiled():
        return original(model, aot_compilation_path)


def init_model_state(
    original: Callable[..., Any], vllm_config: Any, model: Any, encoder_cache: Any, device: Any
) -> Any:
    """BastionModelState in place of DefaultModelState."""
    from vllm_bastion.engine.runtime import runtime_of

    if bastion_config(vllm_config) is None:
        return original(vllm_config, model, encoder_cache, device)
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    from vllm_bastion.engine.target import BastionModelState
    from vllm_bastion.validate.engine import check_layers

    vllm_class = resolve_model_state_cls(vllm_config, model)
    ours = BastionModelState
    if vllm_class is MambaHybridModelState:
        from vllm_bastion.engine.gated_delta import GatedDeltaModelState

        ours = GatedDeltaModelState
    elif vllm_class is not DefaultModelState:
        raise ValueError(
            f"method 'bastion' serves decoder models; {type(model).__name__} keeps state of "
            "its own between tokens. Use method 'dflash' for it."
        )
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    check_layers({n: la for n, la in layers.items() if not getattr(la, "is_draft_layer", False)})
    return ours(runtime_of(vllm_config), vllm_config, model, encoder_cache, device)


def create_manager(original: Callable[..., Any], **kwargs: Any) -> Any:
    """TreeBudgetManager."""
    from vllm_bastion.engine.runtime import runtime_of

    vllm_config = kwargs["vllm_config"]
    config = bastion_config(vllm_config)
    if config is None:
        return original(**kwargs)
    from vllm_bastion.engine.budget import TreeBudgetManager
    from vllm_bastion.engine.limits import max_verified_rows

    runtime = runtime_of(vllm_config)
    runtime.manager = TreeBudgetManager(
        runtime,
        kwargs["req_states"],
        kwargs["query_start_loc"],
        kwargs["num_bonus_tokens"],
        min(kwargs["max_total_logits"], max_verified_rows(vllm_config)),
        lagged=is_lagged(config),
    )
    return runtime.manager


def resolve_cudagraph_mode(original: Callable[..., Any], mode: Any, **kwargs: Any) -> Any:
    """vLLM itself calls this with FULL graphs only, so nothing changes for it."""
    return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode


def cudagraph_manager(
    original: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """BastionCudaGraphManager in place of ModelCudaGraphManager."""
    if bastion_config(vllm_config) is None:
        return original(vllm_config, *args, **kwargs)
    from vllm_bastion.attention.graphs import BastionCudaGraphManager

    return BastionCudaGraphManager(vllm_config, *args, **kwargs)


def structured_outputs_worker(original: Callable[..., Any], **kwargs: Any) -> Any:
    """SharedBitmask in place of StructuredOutputsWorker."""
    vllm_config, config = _current_config()
    if config is None:
        return original(**kwargs)
    from vllm_bastion.engine.bitmask import SharedBitmask
    from vllm_bastion.engine.limits import max_bitmask_rows

    kwargs["mask_stride"] = config.max_grammar_tokens + 1
    kwargs["max_num_logits"] = max_bitmask_rows(vllm_config)
    return SharedBitmask(**kwargs)


def draft_tokens_handler(original: Callable[..., Any], device: Any = None) -> Any:
    """TreeDraftTokens in place of DraftTokensHandler."""
    vllm_config, config = _current_config()
    if config is None:
        return original(device)
    from vllm_bastion.engine.draft_tokens import TreeDraftTokens

    return TreeDraftTokens(vllm_config, device)


def execute_model(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Pass on what the scheduler knows: rejected nodes, waiting prompts, requests that ended."""
    if bastion_config(self.vllm_config) is None:
        return original(self, scheduler_output, *args, **kwargs)
    from vllm_bastion.engine.runtime import runtime_of

    runtime = runtime_of(self.vllm_config)
    runtime.scheduled = None if kwargs.get("dummy_run") else scheduler_output
    try:
        if scheduler_output.kv_cache_block_copies and runtime.deferred is not None:
            runtime.deferred.flush()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if scheduler_output.has_structured_output_requests and drafts:
            # The step comes from the scheduler: warm-up and calibration have no grammar.
            columns = StepPlan.of(scheduler_output).grammar_columns
            if columns:
                from vllm_bastion.engine.draft_tokens import select_columns

                select_columns(runtime, self.req_states, columns)
        return original(self, scheduler_output, *args, **kwargs)
    finally:
        runtime.scheduled = None


def _layout(runner: Any, scheduled: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows and logits of each request of a step with drafts; None if vLLM's own are right."""
    drafts = {} if scheduled is None else scheduled.scheduled_spec_decode_tokens
    if not drafts:
        return None
    if runner.adaptive_verification is not None:
        layout: tuple[np.ndarray, np.ndarray] = runner.adaptive_verification.layout
        return layout
    # A step of warm-up or calibration verifies all scheduled nodes.
    rows, count = len(next(iter(drafts.values()))) + 1, len(drafts)
    if scheduled.total_num_scheduled_tokens != rows * count:
        return None
    return np.full(count, rows), np.full(count, rows)


def set_active_loras(
    original: Callable[..., Any],
    self: Any,
    prompt_lora_mapping: tuple[int, ...],
    token_lora_mapping: tuple[int, ...],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Map a trimmed step's own rows and logits instead of the scheduled ones."""
    if bastion_config(self.vllm_config) is not None:
        from vllm_bastion.engine.runtime import runtime_of

        layout = _layout(self, runtime_of(self.vllm_config).scheduled)
        if layout is not None:
            adapters = np.asarray(prompt_lora_mapping)  # one for each request
            num_rows, num_logits = layout
            token_lora_mapping = tuple(adapters.repeat(num_rows).tolist())
            prompt_lora_mapping = tuple(adapters.repeat(num_logits).tolist())
    original(self, prompt_lora_mapping, token_lora_mapping, *args, **kwargs)


def sample_tokens(original: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
    """Attach counts for the scheduler to the step's output, see `hooks.scheduler`."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    manager, computed = self.adaptive_verification, self.execute_model_state is not None
    output = original(self, _rows_in_use(self, grammar_output))
    counts = computed and manager is not None and bastion_config(self.vllm_config) is not None
    if counts and isinstance(output, AsyncModelRunnerOutput):
        return manager.counted(output)
    return output


def _rows_in_use(runner: Any, grammar_output: Any) -> Any:
    """As many bitmask rows per request as its largest tree needs, if each came with N + 1.

    vLLM 0.33's warm-up sends N + 1 equal rows, or fewer where `warm_up_kernels` drafts less.
    """
    config = bastion_config(runner.vllm_config)
    if config is None or grammar_output is None:
        return grammar_output
    mask, reqs = grammar_output.grammar_bitmask, len(grammar_output.structured_output_request_ids)
    if len(mask) != reqs * runner.decode_query_len:
        return grammar_output
    rows = np.minimum(np.arange(config.max_grammar_tokens + 1), runner.decode_query_len - 1)
    used = mask.reshape(reqs, runner.decode_query_len, -1)[:, rows]
    return replace(grammar_output, grammar_bitmask=used.reshape(-1, mask.shape[1]))
