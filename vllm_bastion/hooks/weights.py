# SPDX-License-Identifier: Apache-2.0
"""Hooks where a worker gets new weights: from its disk, or from a trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_bastion.config import bastion_config


def reload_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Renew what depends on the target's weights."""
    original(self, *args, **kwargs)
    _changed(self)


def update_weights(original: Callable[..., Any], self: Any, update_info: Any) -> None:
    """A drafter's weights get the products of a drafter."""
    with _loading(self):
        original(self, update_info)


def finish_weight_update(original: Callable[..., Any], self: Any) -> None:
    """Renew what depends on the weights."""
    with _loading(self):
        original(self)
    _changed(self)


def _loading(worker: Any) -> AbstractContextManager[None]:
    config = bastion_config(worker.vllm_config)
    if config is None or not (worker._weight_update_active and worker._weight_update_is_draft):
        return nullcontext()
    from vllm_bastion.engine.weights import loading_drafter

    return loading_drafter(worker.get_draft_model(), config.method)


def _changed(worker: Any) -> None:
    if bastion_config(worker.vllm_config) is None:
        return
    from vllm.config import set_current_vllm_config

    from vllm_bastion.engine.weights import weights_changed

    with set_current_vllm_config(worker.vllm_config):
        weights_changed(worker.model_runner.get_model(), worker.get_draft_model())
