# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM's attention backend what it serves, before a worker's layers do.

Tree attention takes the place of one backend's kernel, and that backend still writes the cache and
runs steps without trees. On a GPU that it does not serve the target on, vLLM raises where the first
layer is built, in the worker; without method "bastion" it would take another backend.
"""

from __future__ import annotations

from typing import Any

from vllm_bastion.platform import current_host
from vllm_bastion.validation import BastionConfigError

# Targets whose layers have sinks by their architecture, and keys of configs that say so.
_WITH_SINKS = frozenset({"GptOssForCausalLM"})
_SINK_KEYS = ("add_swa_attention_sink_bias", "swa_attention_sink_enabled")


def check_backend(vllm_config: Any) -> None:
    """Refuse what the backend does not serve on this device; `attention_config.backend` is set.

    Raises:
        BastionConfigError: with the backend's own reasons.
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
            f"vLLM's attention backend {named.name}, which tree attention works beside, does not "
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
