# SPDX-License-Identifier: Apache-2.0
"""Wrappers around what a worker's models are built of: attention, products, compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_bastion.checkpoints.drafter_types import DRAFTER_TYPES
from vllm_bastion.config import BastionSpeculativeConfig, bastion_config
from vllm_bastion.platform import current_host


def get_attn_backend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A tree-capable backend for a target layer; vLLM's own for a drafter's."""
    backend, config = original(*args, **kwargs), current_config()
    if config is None or _builds_drafter():
        return backend
    return current_host().tree_backend(backend)


def current_config() -> BastionSpeculativeConfig | None:
    """The settings of method "bastion" in vLLM's current configuration; None without."""
    from vllm.config import get_current_vllm_config_or_none

    return bastion_config(get_current_vllm_config_or_none())


def _builds_drafter() -> bool:
    """Whether the model that is being built is a drafter: vLLM builds them under these tags."""
    from vllm.compilation import backends

    return backends.model_tag in {f"{drafter_type.method}_head" for drafter_type in DRAFTER_TYPES}


def cpu_product(original: Callable[..., Any], layer: Any, remove_weight: bool) -> Any:
    """int8 for a linear layer of a drafter; our bf16 product for others, where it is faster."""
    config = current_config()
    if config is None:
        return original(layer, remove_weight)
    installed = current_host().install_product(
        layer,
        drafter_weights=config.bastion_drafter_weights,
        in_drafter=_builds_drafter(),
        remove_weight=remove_weight,
    )
    return None if installed else original(layer, remove_weight)


def load_compiled(original: Callable[..., Any], model: Any, aot_compilation_path: str) -> Any:
    """Load what an earlier start compiled, also on a CPU."""
    if bastion_config(model.vllm_config) is None:
        return original(model, aot_compilation_path)
    with current_host().loading_compiled():
        return original(model, aot_compilation_path)
