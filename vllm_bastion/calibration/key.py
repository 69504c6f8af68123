# SPDX-License-Identifier: Apache-2.0
"""The key of an engine's profile, from its configuration and from what only its runner knows.

`vllm-bastion check` makes it without a runner, so this module must not import vLLM's model runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import vllm
from vllm.config import CompilationConfig, ModelConfig, VllmConfig

from vllm_bastion import __version__
from vllm_bastion.config import settings_of
from vllm_bastion.host import HostChoices
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost.store import ProfileKey, config_hash


def key_of(
    config: VllmConfig,
    *,
    device: str,
    backends: Iterable[str],
    captured: Sequence[int],
    largest: tuple[int, int, int],
) -> ProfileKey:
    """The key of an engine of method "bastion".

    Args:
        config: of the engine.
        device: as `policy.cost.devices.device_name` calls it.
        backends: names of the attention backends of target and drafter.
        captured: sizes of the FULL CUDA graphs of verifying steps, ascending.
        largest: requests, rows and cached tokens of the largest steps that are timed.
    """
    spec = settings_of(config)
    target = config.model_config.hf_text_config.to_dict()
    drafter = spec.draft_model_config.hf_config.to_dict()
    # vLLM fills this in when it builds the model.
    if drafter.get("draft_vocab_size") is None:
        drafter["draft_vocab_size"] = drafter.get("vocab_size")
    choices = host_choices(config)
    if choices.own_products is not None:
        target["products"] = "bastion" if choices.own_products else "vllm"
    if choices.int8_drafter:
        drafter["weights"] = "int8"
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    if config.cache_config.cache_dtype != "auto":
        dtype += f", cache {config.cache_config.cache_dtype}"
    return ProfileKey(
        device=device,
        target_hash=config_hash(target),
        drafter_hash=config_hash(drafter),
        dtype=dtype,
        attention_backend="+".join(sorted(set(backends))),
        tp_size=config.parallel_config.tensor_parallel_size,
        vllm_version=vllm.__version__,
        graph_sizes=tuple(captured),
        dp_size=config.parallel_config.data_parallel_size,
        expert_parallel=config.parallel_config.enable_expert_parallel,
        largest=largest,
        package_version=__version__,
        compile_mode=_compile_mode(config.compilation_config),
        target_quantization=_quantization(config.model_config),
        drafter_quantization=_quantization(spec.draft_model_config),
    )


def host_choices(config: VllmConfig) -> HostChoices:
    """What the host chooses for an engine of method "bastion"."""
    spec = settings_of(config)
    return current_host().choices(spec.bastion_drafter_weights, config.model_config.dtype)


def _compile_mode(compilation: CompilationConfig) -> str:
    """vLLM's compilation mode and CUDA graph mode; both are NONE with ``enforce_eager``."""
    return f"{compilation.mode.name}, CUDA graphs {compilation.cudagraph_mode.name}"


def _quantization(model: ModelConfig) -> str:
    """The checkpoint's method or that of ``--quantization``, and the settings of an online one.

    The hash of a model's config does not show weights that are quantised as they are loaded.
    """
    settings = f", {model.quantization_config}" if model.quantization_config else ""
    return f"{model.quantization or 'none'}{settings}"
