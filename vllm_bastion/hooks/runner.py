# SPDX-License-Identifier: Apache-2.0
"""Wrappers inside the model runner, installed by `hooks.worker`.

Functions that `vllm.v1.worker.gpu.model_runner` imported by name are wrapped there, where they are
looked up. Each wrapper checks the config it is given, so an engine without bastion in the same
process gets the originals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any
from weakref import ref

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_bastion.attention.graphs import BastionCudaGraphManager
from vllm_bastion.checkpoints.drafter_types import drafter_type_of
from vllm_bastion.config import bastion_config, is_lagged
from vllm_bastion.engine.budget import TreeBudgetManager
from vllm_bastion.engine.gated_delta import GatedDeltaModelState
from vllm_bastion.engine.limits import max_tree_rows, max_verified_rows
from vllm_bastion.engine.runtime import make_runtime, runtime_of
from vllm_bastion.engine.target import BastionModelState
from vllm_bastion.hooks.layers import current_config
from vllm_bastion.validate.engine import check_layers

_MODEL_STATES = {DefaultModelState: BastionModelState, MambaHybridModelState: GatedDeltaModelState}


def init_speculator(
    original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any
) -> Any:
    """BastionSpeculator, or the one for the drafter's type, in place of vLLM's."""
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
    """Our subclass of the model state that vLLM would choose."""
    if bastion_config(vllm_config) is None:
        return original(vllm_config, model, encoder_cache, device)
    ours = _MODEL_STATES.get(resolve_model_state_cls(vllm_config, model))
    if ours is None:
        raise ValueError(
            f"method 'bastion' serves decoder models; {type(model).__name__} keeps state of "
            "its own between tokens. Use method 'dflash' for it."
        )
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    check_layers({n: la for n, la in layers.items() if not getattr(la, "is_draft_layer", False)})
    return ours(runtime_of(vllm_config), vllm_config, model, encoder_cache, device)


def create_manager(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Our `TreeBudgetManager` in place of vLLM's manager."""
    vllm_config = kwargs["vllm_config"]
    config = bastion_config(vllm_config)
    if config is None:
        return original(**kwargs)
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
    """Return a mode without FULL graphs as it is. Other methods only pass modes that have them."""
    return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode


def cudagraph_manager(
    original: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """BastionCudaGraphManager in place of ModelCudaGraphManager."""
    if bastion_config(vllm_config) is None:
        return original(vllm_config, *args, **kwargs)
    manager = BastionCudaGraphManager(vllm_config, *args, **kwargs)
    runtime_of(vllm_config).target_graphs = ref(manager)
    return manager


def structured_outputs_worker(original: Callable[..., Any], **kwargs: Any) -> Any:
    """vLLM's, with rows for as many drafts of each request as a grammar checks."""
    config = current_config()
    if config is not None:
        rows = 1 + config.max_grammar_tokens
        reqs = kwargs["max_num_logits"] // kwargs["mask_stride"]
        kwargs |= {"max_num_logits": reqs * rows, "mask_stride": rows}
    return original(**kwargs)


def warm_up_kernels(original: Callable[..., Any], model_runner: Any, *args: Any, **kw: Any) -> Any:
    """vLLM's warm-up, with no more drafts than fit the model's length and one step."""
    config = model_runner.vllm_config
    steps, rows = model_runner.num_speculative_steps, model_runner.decode_query_len
    if bastion_config(config) is None:
        return original(model_runner, *args, **kw)
    most, scheduler = max_verified_rows(config), model_runner.scheduler_config
    # The first request takes 4 * rows + 3 tokens: a prompt of rows + 1, three steps with drafts,
    # and two without.
    fitting = min((model_runner.max_model_len - 3) // 4, most)
    left_out = min(max(0, rows - fitting), steps - 1)
    few = copy.copy(scheduler)
    few.max_num_seqs = min(scheduler.max_num_seqs, max(1, most // (rows - left_out)))
    try:
        model_runner.scheduler_config = few
        model_runner.num_speculative_steps = steps - left_out
        model_runner.decode_query_len = rows - left_out
        return original(model_runner, *args, **kw)
    finally:
        model_runner.scheduler_config = scheduler
        model_runner.num_speculative_steps, model_runner.decode_query_len = steps, rows
