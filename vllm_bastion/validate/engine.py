# SPDX-License-Identifier: Apache-2.0
"""Validates the finished configuration of an engine, and the layers of its loaded target."""

from __future__ import annotations

from typing import Any

import torch

from vllm_bastion.config import BastionSpeculativeConfig, settings_of
from vllm_bastion.platform import current_host
from vllm_bastion.validate import BastionConfigError

_DOES_NOT_WORK = 'does not work with method "bastion"'
# What tree attention reads.
_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
# vLLM's connectors that do nothing in `save_kv_layer` and `finish_forward`, which vLLM calls while
# the cache holds rejected nodes.
_SAVE_AT_STEP_END = frozenset({
    "DecodeBenchConnector", "HF3FSKVConnector", "MooncakeConnector", "MooncakeStoreConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "OffloadingConnector",
    "SimpleCPUOffloadConnector",
})  # fmt: skip


def check_engine(vllm_config: Any) -> None:
    """Check the finished configuration of an engine that uses method "bastion"."""
    spec_config = settings_of(vllm_config)
    _check_connector(vllm_config)
    _check_attention(vllm_config)
    _check_sizes(vllm_config, spec_config)
    if vllm_config.lora_config is not None and (
        spec_config.bastion_budget == "adaptive" and spec_config.bastion_budget_timing == "lagged"
    ):
        raise BastionConfigError(
            '"bastion_budget_timing": "lagged" does not work with enable_lora, because the host '
            'must know which rows belong to which adapter: set it to "auto"'
        )
    if not vllm_config.use_v2_model_runner:
        raise BastionConfigError(
            'method "bastion" needs Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER, and drop the '
            "options that vLLM's warning above names, if any"
        )


def _check_attention(vllm_config: Any) -> None:
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in _CACHE_DTYPES:
        raise BastionConfigError(
            f'kv_cache_dtype "{cache_dtype}" {_DOES_NOT_WORK}: use "auto" or "fp8"'
        )
    backend, host = vllm_config.attention_config.backend, current_host()
    if backend is None or host.default_attention_backend() is None:
        return  # a CPU has one backend; vLLM names Triton's there for Gemma 4, and ignores it
    if backend.name != "FLASH_ATTN":
        try:
            host.tree_backend(backend.get_class())
        except ValueError as error:
            raise BastionConfigError(str(error)) from None


def _check_sizes(vllm_config: Any, spec_config: BastionSpeculativeConfig) -> None:
    nodes, length = spec_config.num_speculative_tokens, vllm_config.model_config.max_model_len
    if nodes + 1 > length:  # the warm-up would write past a context's blocks
        raise BastionConfigError(
            f'"num_speculative_tokens": {nodes} does not fit into max_model_len {length}: lower it '
            f"to at most {length - 1}, or raise max_model_len"
        )
    check_rows(spec_config, vllm_config.scheduler_config.max_num_batched_tokens)
    draft_len = spec_config.draft_model_config.max_model_len
    if draft_len < length and not spec_config.rope_only_sizes_cache():
        raise BastionConfigError(
            f"max_model_len {length} is beyond the {draft_len} positions of drafter "
            f'"{spec_config.model}", whose rotary embedding cannot be extended: set max_model_len '
            f"to {draft_len}"
        )


def check_rows(spec_config: BastionSpeculativeConfig, limit: int) -> None:
    """Refuse a step of so few rows that one request's tree and draft do not fit.

    vLLM 0.33 refuses some of them before its configuration is finished, without a way out.
    """
    nodes, gamma = spec_config.num_speculative_tokens, spec_config.bastion_gamma
    if 1 + nodes + gamma > limit:
        most = limit - 1 - gamma
        way_out = f"lower it to {most} or " if most >= 1 else ""
        raise BastionConfigError(
            f'"num_speculative_tokens": {nodes} needs max_num_batched_tokens of at least '
            f"{1 + nodes + gamma} (1 + nodes + the drafter's {gamma}), which is {limit}: "
            f"{way_out}raise max_num_batched_tokens"
        )


def _check_connector(vllm_config: Any) -> None:
    config = vllm_config.kv_transfer_config  # kv_offloading_size makes one as well
    if config is None or config.kv_connector is None:
        return
    if vllm_config.model_config.is_hybrid:
        raise BastionConfigError(
            f"the KV connector {config.kv_connector} {_DOES_NOT_WORK} for a target with recurrent "
            "layers, whose states no test has moved: remove kv_transfer_config and "
            "kv_offloading_size"
        )
    early = saving_too_early(config)
    if early is not None:
        raise BastionConfigError(
            f"the KV connector {early} {_DOES_NOT_WORK}, because it may save draft nodes before "
            "they are rejected: name one in kv_transfer_config that saves at the end of a step, as "
            "NixlConnector and OffloadingConnector do, or remove it"
        )


def saving_too_early(config: Any) -> str | None:
    """The first connector that may save nodes which are not accepted yet, by name; None if none.

    Between the target's forward pass and the end of a step the cache holds the keys and values of
    rejected nodes, so a connector may save in `wait_for_save` or when a request has finished, but
    not layer by layer. One that is not vLLM's says so itself: `saves_at_step_end = True`.

    config: vLLM's KVTransferConfig. A connector whose package is missing is left to vLLM, which
    cannot start it.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if config.kv_connector == "MultiConnector":
        parts = config.kv_connector_extra_config.get("connectors") or []
        found = (saving_too_early(KVTransferConfig(**part)) for part in parts)
        return next((name for name in found if name is not None), None)
    if config.kv_connector_module_path is None and config.kv_connector in _SAVE_AT_STEP_END:
        return None
    try:
        connector = KVConnectorFactory.get_connector_class(config)
    except ImportError:
        return None
    return None if getattr(connector, "saves_at_step_end", False) else str(config.kv_connector)


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse attention layers of a loaded target that the tree kernels do not implement.

    layers: by name, the drafter's left out.
    """
    for name, layer in layers.items():
        what = None
        if getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None:
            what = "uses ALiBi"
        elif getattr(layer, "attn_type", "decoder") != "decoder":
            what = f"is of type {layer.attn_type}"
        elif getattr(layer, "_k_scale", torch.ones(1)).numel() > 1:
            what = "scales its KV cache head by head"
        if what is not None:
            raise BastionConfigError(
                f'attention layer {name} of the target {what}, which method "bastion" cannot '
                "verify trees on: use another target, or drop speculative_config"
            )
