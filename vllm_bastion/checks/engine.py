# SPDX-License-Identifier: Apache-2.0
"""Checks of an engine: its options, its finished configuration, and its loaded layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs as vllm_envs

from vllm_bastion.checks import BastionConfigError
from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.platform import current_host

_DOES_NOT_WORK = 'does not work with method "bastion"'

# Options of EngineArgs that a tree cannot serve -> the value that switches them off.
_OPTIONS_OFF: dict[str, Any] = {
    "pipeline_parallel_size": 1,  # early stages know neither the path nor the budget
    "decode_context_parallel_size": 1,  # an accepted path's KV is spread over ranks
    "prefill_context_parallel_size": 1,
    "enable_elastic_ep": False,  # a rank that joins later has no part in measuring the step costs
    "enable_dbo": False,
    "ubatch_size": 0,
    "enable_batch_sharded_sampling": False,
    "watermark_config": None,
    "return_sampling_mask": False,  # assumes that row i of a request is its token i
    "enable_return_routed_experts": False,
}
# The reason, for options whose refusal needs one.
_REASONS = {
    "pipeline_parallel_size": "only the last stage knows how many nodes a step verifies, and which "
    "of them it accepts",
}
# What tree attention reads.
_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


# What vLLM calls on a connector between the target's layers and the end of the step.
_TOO_EARLY = ("save_kv_layer", "finish_forward")

# Targets whose layers have sinks by their architecture, and keys of configs that say so.
_WITH_SINKS = frozenset({"GptOssForCausalLM"})
_SINK_KEYS = ("add_swa_attention_sink_bias", "swa_attention_sink_enabled")


def check_host() -> None:
    """Refuse a host whose vLLM can run neither Triton's kernels nor their native twins."""
    refusal = current_host().refusal()
    if refusal is not None:
        raise BastionConfigError(refusal)


def check_arguments(engine_args: Any) -> None:
    """Refuse options of vLLM's EngineArgs that do not go with trees.

    Runs before vLLM's own checks, which would refuse some of these for unrelated reasons.
    """
    own = (engine_args.speculative_config or {}).get("draft_tensor_parallel_size")
    if own not in (None, engine_args.tensor_parallel_size):
        raise BastionConfigError(
            f'"draft_tensor_parallel_size": {own!r} {_DOES_NOT_WORK}, whose drafter is split as '
            f"the target is ({engine_args.tensor_parallel_size}): remove it"
        )
    for option, off in _OPTIONS_OFF.items():
        value = getattr(engine_args, option)
        if value is not None and value != off:
            way_out = f"set it to {off}" if off else "remove it"
            why = f", because {_REASONS[option]}" if option in _REASONS else ""
            raise BastionConfigError(f"{option} {_DOES_NOT_WORK}{why}: {way_out}")


def check_engine(vllm_config: Any) -> None:
    """Check the finished configuration of an engine that uses method "bastion"."""
    spec_config = vllm_config.speculative_config
    assert isinstance(spec_config, BastionSpeculativeConfig)
    _check_calibration(spec_config.bastion_calibration)
    _check_connector(vllm_config)
    if vllm_config.lora_config is not None and (
        spec_config.bastion_budget == "adaptive" and spec_config.bastion_budget_timing == "lagged"
    ):
        raise BastionConfigError(
            '"bastion_budget_timing": "lagged" does not work with enable_lora, because the host '
            'must know which rows belong to which adapter: set it to "auto"'
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in _CACHE_DTYPES:
        raise BastionConfigError(
            f'kv_cache_dtype "{cache_dtype}" {_DOES_NOT_WORK}: use "auto" or "fp8"'
        )
    if vllm_envs.VLLM_BATCH_INVARIANT:
        raise BastionConfigError(
            f"VLLM_BATCH_INVARIANT=1 {_DOES_NOT_WORK}, because how tree attention sums depends on "
            "the batch: unset it"
        )
    if not vllm_config.use_v2_model_runner:
        raise BastionConfigError(
            'method "bastion" needs Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER, and drop the '
            "options that vLLM's warning above names, if any"
        )
    draft_len = spec_config.draft_model_config.max_model_len
    if (
        not spec_config.rope_only_sizes_cache()
        and draft_len < vllm_config.model_config.max_model_len
    ):
        raise BastionConfigError(
            f"max_model_len {vllm_config.model_config.max_model_len} is beyond the {draft_len} "
            f'positions of drafter "{spec_config.model}", whose rotary embedding cannot be '
            f"extended: set max_model_len to {draft_len}"
        )
    check_token_limit(
        spec_config.num_speculative_tokens,
        spec_config.bastion_gamma,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _check_calibration(setting: str) -> None:
    """Refuse a file that is missing or not a profile before the weights are loaded."""


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
    """The name of the first connector that may save before nodes are rejected; None if none does.

    Between the target's forward pass and the end of a step, the cache holds the keys and values of
    nodes that are not accepted. A connector that saves at the end of the step (`wait_for_save`) or
    when a request has finished finds accepted rows where they belong. A connector that saves layer
    by layer inside the forward pass would store rejected rows.

    config: vLLM's KVTransferConfig. A method whose code names nothing does nothing; any other may
    save. A MultiConnector is refused if one of its parts is. A connector whose package is missing
    is left to vLLM, which cannot start it.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if config.kv_connector == "MultiConnector":
        parts = config.kv_connector_extra_config.get("connectors") or []
        found = (saving_too_early(KVTransferConfig(**part)) for part in parts)
        return next((name for name in found if name is not None), None)
    try:
        connector = KVConnectorFactory.get_connector_class(config)
    except ImportError:
        return None
    methods = (getattr(connector, name) for name in _TOO_EARLY)
    early = any(method.__code__.co_names for method in methods)
    return str(config.kv_connector) if early else None


def check_backend(vllm_config: Any) -> None:
    """Ask vLLM's attention backend, `attention_config.backend`, what it serves on this device.

    Tree attention replaces the kernel of one backend, which still writes the cache and runs steps
    without trees. Where that backend does not serve the target on a GPU, vLLM raises when a worker
    builds the first layer; without method "bastion" it would take another backend.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    named, model = vllm_config.attention_config.backend, vllm_config.model_config
    capability = current_platform.get_device_capability()
    if named is None or capability is None or model.use_mla:
        return
    backend, text, cache = named.get_class(), model.hf_text_config, vllm_config.cache_config
    if backend.get_name() != "FLASH_ATTN":
        try:
            current_host().tree_backend(backend, cache.cache_dtype)
        except ValueError as error:
            raise BastionConfigError(str(error)) from None
    kinds = getattr(text, "layer_types", None) or ()
    found: list[str] = []
    with set_current_vllm_config(vllm_config):
        for size in _head_sizes(model):
            found += backend.validate_configuration(
                head_size=size,
                dtype=model.dtype,
                kv_cache_dtype=cache.cache_dtype,
                block_size=cache.block_size if cache.user_specified_block_size else None,
                use_mla=False,
                has_sink=has_sinks(model.architecture, text),
                use_sparse=False,
                use_mm_prefix=False,  # refused
                use_per_head_quant_scales=False,
                device_capability=capability,
                attn_type="decoder",
                has_sliding_window="sliding_attention" in kinds,
            )
    if found:
        reasons = "; ".join(dict.fromkeys(found))
        way_out = 'set kv_cache_dtype to "auto", or ' if "kv_cache_dtype" in reasons else ""
        raise BastionConfigError(
            f"vLLM's attention backend {named.name}, on which tree attention relies, does not "
            f"serve this target on a GPU of compute capability {capability.as_version_str()} "
            f"({reasons}): {way_out}use another GPU, or drop speculative_config"
        )


def has_sinks(architecture: str, config: Any) -> bool:
    """Whether a target's attention layers have sinks; config: its text config."""
    return architecture in _WITH_SINKS or any(getattr(config, key, False) for key in _SINK_KEYS)


def _head_sizes(model: Any) -> set[int]:
    """Sizes of the heads: Gemma 4's global layers have larger ones."""
    large = getattr(model.hf_text_config, "global_head_dim", None)
    return {model.get_head_size(), *([large] if large else [])}


def check_token_limit(nodes: int, gamma: int, limit: int | None) -> None:
    """A step of one request (root, nodes, drafter's block) must fit into the batch token limit."""
    if limit is not None and 1 + nodes + gamma > limit:
        room = limit - 1 - gamma
        way_out = f"lower it to {room} or " if room >= 1 else ""
        raise BastionConfigError(
            f'"num_speculative_tokens": {nodes} needs max_num_batched_tokens of at least '
            f"{1 + nodes + gamma} (1 + nodes + the drafter's {gamma}), which is {limit}: "
            f"{way_out}raise max_num_batched_tokens"
        )


def check_length(nodes: int, max_model_len: int) -> None:
    """A tree and its root must fit into a context: otherwise warm-up writes past its blocks."""
    if nodes + 1 > max_model_len:
        raise BastionConfigError(
            f'"num_speculative_tokens": {nodes} does not fit into max_model_len {max_model_len}: '
            f"lower it to at most {max_model_len - 1}, or raise max_model_len"
        )


def too_few_rows_for_adapters(engine_args: Any) -> BastionConfigError:
    """Our error where vLLM refuses adapters, because a step cannot hold every request's nodes.

    engine_args: vLLM's EngineArgs, with its defaults filled in.
    """
    limit, requests = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    most = limit // requests - 1
    way_out = f'set "num_speculative_tokens" to at most {most}, ' if most >= 1 else ""
    return BastionConfigError(
        f"enable_lora needs max_num_batched_tokens ({limit}) of at least max_num_seqs ({requests}) "
        f'x (1 + "num_speculative_tokens"): {way_out}lower max_num_seqs or raise '
        "max_num_batched_tokens"
    )


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse attention layers of a loaded target that the tree kernels do not implement.

    layers: by name, the drafter's left out.
    """
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        what = None
        if getattr(impl, "alibi_slopes", None) is not None:
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
