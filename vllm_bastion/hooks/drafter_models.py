# SPDX-License-Identifier: Apache-2.0
"""Registers models and formats of drafters that vLLM does not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_bastion.checkpoints.kinds import KINDS


def teach_drafters() -> None:
    """Register with vLLM the models that it does not have, and their format.

    Called where an engine is configured and in its workers, before a drafter's checkpoint is read.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

    for kind in KINDS:
        for architecture in kind.models:
            if architecture not in ModelRegistry.models:
                ModelRegistry.register_model(architecture, kind.model)
        if kind.library_format is not None:
            # `restore_settings` adds the head's settings.
            read = partial(_read_as_dflash, SUPPORTED_SPECULATORS_TYPES["dflash"])
            SUPPORTED_SPECULATORS_TYPES.setdefault(kind.library_format, read)


def _read_as_dflash(
    read_dflash: Callable[..., None],
    config_dict: dict[str, Any],
    pre_trained_config: dict[str, Any],
) -> None:
    """Without `sample_from_anchor`, which vLLM's DFlash refuses and our kinds read themselves."""
    read_dflash(config_dict | {"sample_from_anchor": False}, pre_trained_config)
