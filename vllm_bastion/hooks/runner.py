# SPDX-License-Identifier: Apache-2.0
"""Wrappers inside the model runner, installed by `hooks.worker`.

Functions that `vllm.v1.worker.gpu.model_runner` imported by name are wrapped there, where they are
looked up. Each wrapper checks the config it is given, so an engine without bastion in the same
process gets the originals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any
from weakref import ref

import numpy as np

from vllm_bastion.checkpoints.drafter_types import drafter_type_of
from vllm_bastion.config import bastion_config, is_lagged
from vllm_bastion.hooks.layers import current_config


def init_speculator(
    original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any
) -> Any:
    """BastionSpeculator, or the one for the drafter's type, in place of vLLM's."""
    from vllm_bastion.engine.runtime import make_runtime

    spec_config = bastion_config(vllm_config)
    if spec_config is None:
        return original(vllm_config, device, req_states)
    drafter_type = drafter_type_of(spec_config.draft_model_config.architectures)
    assert drafter_type is not None  # checked by the validation
    speculator = resolve_name(drafter_type.speculator)
    return speculator(make_runtime(vllm_config, device), vllm_config, device, req_states)


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
    from vllm_bastion.engine.limits import max_tree_rows, max_verified_rows

    runtime = runtime_of(vllm_config)
    runtime.manager = TreeBudgetManager(
        runtime,
        kwargs["req_states"],
        kwargs["query_start_loc"],
        kwargs["num_bonus_tokens"],
        min(kwargs["max_total_logits"], max_verified_rows(vllm_config)),
        max_tree_rows(vllm_config),
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
    from vllm_bastion.engine.runtime import runtime_of

    manager = BastionCudaGraphManager(vllm_config, *args, **kwargs)
    runtime_of(vllm_config).target_graphs = ref(manager)
    return manager


def structured_outputs_worker(original: Callable[..., Any], **kwargs: Any) -> Any:
    """SharedBitmask in place of StructuredOutputsWorker."""
    vllm_config, config = current_config()
    if config is None:
        return original(**kwargs)
    from vllm_bastion.engine.bitmask import SharedBitmask
    from vllm_bastion.engine.limits import max_bitmask_rows

    kwargs["mask_stride"] = config.max_grammar_tokens + 1
    kwargs["max_num_logits"] = max_bitmask_rows(vllm_config)
    return SharedBitmask(**kwargs)


def draft_tokens_handler(original: Callable[..., Any], device: Any = None) -> Any:
    """TreeDraftTokens in place of DraftTokensHandler."""
    vllm_config, config = current_config()
    if config is None:
        return original(device)
    from vllm_bastion.engine.draft_tokens import TreeDraftTokens

    return TreeDraftTokens(vllm_config, device)


def execute_model(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Pass on what the scheduler knows, and store deferred rows before blocks are copied."""
    if bastion_config(self.vllm_config) is None:
        return original(self, scheduler_output, *args, **kwargs)
    from vllm_bastion.engine.runtime import runtime_of

    runtime = runtime_of(self.vllm_config)
    runtime.scheduled = None if kwargs.get("dummy_run") else scheduler_output
    try:
        if scheduler_output.kv_cache_block_copies and runtime.deferred is not None:
            runtime.deferred.flush()
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
    # A step of warm-up verifies all scheduled nodes.
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
