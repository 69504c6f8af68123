# SPDX-License-Identifier: Apache-2.0
"""Start-up checks: everything a tree cannot serve is refused before the engine exists.

Every message is one sentence that names the key or flag and the way out. Each check runs as soon as
what it reads exists: the user's keys, then the target model and the drafter's checkpoint
(`validation_models`), then the finished configuration. `check_layers` looks at the loaded target
for what no configuration says.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from pydantic import ValidationError
from vllm import envs as vllm_envs

from vllm_bastion.config import (
    PREFIX,
    BastionSpeculativeConfig,
    default_of,
    key_adapter,
    key_choices,
    literals,
    standard_keys,
    user_keys,
)
from vllm_bastion.connectors import saving_too_early
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost.store import ProfileError, check_setting

METHOD = "bastion"

# vLLM's own keys of which trees support one value: key -> (that value, why).
_FIXED_KEYS: dict[str, tuple[Any, str]] = {
    "draft_sample_method": ("greedy", "a tree holds the drafter's best candidates, not samples"),
    "rejection_sample_method": ("standard", "bastion follows the target's own samples"),
    "enable_adaptive_verification": (False, "bastion sizes the verification itself"),
    "use_heterogeneous_vocab": (False, "drafter and target must share a vocabulary"),
    "use_local_argmax_reduction": (False, "a tree needs more than the best token of a position"),
    "num_speculative_tokens_per_batch_size": (None, "bastion shares one budget over the batch"),
}

# vLLM's own keys that do something with this method.
_READ_KEYS = frozenset(
    {
        "attention_backend",
        "code_revision",
        "draft_load_config",
        "draft_tensor_parallel_size",
        "dspark_draft_topk",
        "kv_cache_dtype",
        "max_model_len",
        "method",
        "model",
        "moe_backend",
        "num_speculative_tokens",
        "quantization",
        "revision",
    }
)
# What to set instead of one that does nothing.
_INSTEAD = {"enforce_eager": "set the engine's enforce_eager"}

_DOES_NOT_WORK = 'does not work with method "bastion"'

# Options of EngineArgs that a tree cannot serve -> the value that switches them off.
_OPTIONS_OFF: dict[str, Any] = {
    "pipeline_parallel_size": 1,  # early stages know neither path nor budget
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
# Why, where a user may ask.
_REASONS = {
    "pipeline_parallel_size": "only the last stage knows how many nodes a step verifies, and which "
    "of them it accepts",
}
# What tree attention reads.
_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


class BastionConfigError(ValueError):
    """A configuration that method "bastion" refuses."""


def refuse_other_spelling(given: dict[str, Any]) -> None:
    """Refuse keys of method "bastion" beside another method, or none, or its name misspelt.

    Args:
        given: the speculative configuration of an engine that does not ask for the method.
    """
    method = given.get("method")
    word = method.strip().lower() if isinstance(method, str) else ""
    if word == METHOD or difflib.get_close_matches(word, [METHOD], cutoff=0.8):
        raise BastionConfigError(f'"method": {method!r} is unknown to vLLM: write "{METHOD}"')
    own = [key for key in given if key.replace("-", "_").startswith(PREFIX)]
    if own:
        what = "no method is named" if method is None else f'the method is "{method}"'
        raise BastionConfigError(
            f'"{own[0]}" in speculative_config is a key of method "{METHOD}", and {what}: set '
            f'"method" to "{METHOD}", or remove the key'
        )


def check_user_keys(given: dict[str, Any]) -> None:
    """Check what the user wrote: names, types, ranges and values of vLLM's own keys.

    Args:
        given: the speculative configuration, hyphens already replaced by underscores.

    Raises:
        BastionConfigError: naming the key and the way out.
    """
    known = (*user_keys(), *standard_keys())
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(user_keys())}"
            raise BastionConfigError(f'unknown key "{key}" in speculative_config: {hint}')
    for key in user_keys():
        if key in given:
            _check_own_key(key, given[key])
    for key, (value, why) in _FIXED_KEYS.items():
        if given.get(key, value) != value:
            raise BastionConfigError(f'"{key}": {given[key]!r} {_DOES_NOT_WORK} ({why}): remove it')
    for key, value in given.items():
        is_read = key in _READ_KEYS or key in _FIXED_KEYS or key in user_keys()
        if not is_read and value not in (None, default_of(key)):
            instead = f"{_INSTEAD[key]} instead" if key in _INSTEAD else "remove it"
            raise BastionConfigError(
                f'"{key}": {value!r} in speculative_config does nothing with method "bastion": '
                f"{instead}"
            )
    if not given.get("model"):
        raise BastionConfigError(
            'method "bastion" needs "model" in speculative_config: the path or the Hugging Face '
            "name of a DFlash drafter trained for the target"
        )
    nodes = given.get("num_speculative_tokens")
    if nodes is not None:  # otherwise `config.default_nodes` chooses
        _check_nodes(nodes, given.get("bastion_budget", "adaptive"))


def check_quantization(keys: dict[str, Any]) -> None:
    """Make "bastion_drafter_weights": "fp8" vLLM's own key; refuse float8 where it has none."""
    own, given = keys.get("bastion_drafter_weights"), keys.get("quantization")
    if own == "fp8":
        if given not in (None, "fp8"):
            raise BastionConfigError(
                f'"bastion_drafter_weights": "fp8" does not go with "quantization": {given!r}: '
                "remove one of them"
            )
        keys["quantization"] = given = "fp8"
    if isinstance(given, str) and "fp8" in given and not current_host().serves_float8_products():
        key = "bastion_drafter_weights" if own == "fp8" else "quantization"
        raise BastionConfigError(
            f'"{key}": "{given}" needs a GPU; on a CPU a bf16 drafter multiplies in int8 already '
            f'("bastion_drafter_weights": "auto"): remove it'
        )


def _check_nodes(nodes: Any, budget: Any) -> None:
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise BastionConfigError(
            '"num_speculative_tokens" must be a whole number of at least 1, the most draft nodes '
            f"verified per step, or left out; got {nodes!r}"
        )
    if isinstance(budget, int) and budget > nodes:
        raise BastionConfigError(
            f'"bastion_budget": {budget} is more than "num_speculative_tokens": {nodes}: lower the '
            "first or raise the second"
        )


def _check_own_key(key: str, value: Any) -> None:
    try:
        key_adapter(key).validate_python(value)
    except ValidationError:
        options = " or ".join(map(_describe, key_choices(key)))
        raise BastionConfigError(f'"{key}" must be {options}; got {value!r}') from None


def _describe(choice: dict[str, Any]) -> str:
    """A JSON schema from `key_choices` in words."""
    if choice.get("type") == "integer":
        low, high = choice["minimum"], choice.get("maximum")
        return "a whole number " + (
            f"of at least {low}" if high is None else f"from {low} to {high}"
        )
    return " or ".join(f'"{name}"' for name in literals(choice)) or '"auto" or "off" or a file name'


def wrong_value(error: ValidationError) -> BastionConfigError:
    """vLLM's refusal of a value in speculative_config, without the frame around it."""
    found = []
    for one in error.errors():
        where = ".".join(map(str, one.get("loc", ())))
        text = one["msg"].removeprefix("Value error, ").splitlines()[0]
        found.append(f'"{where}": {text}' if where else text)
    return BastionConfigError(f"speculative_config: {'; '.join(found)}")


def check_host() -> None:
    """Refuse a host whose vLLM can run neither Triton's kernels nor their native twins."""
    refusal = current_host().refusal()
    if refusal is not None:
        raise BastionConfigError(refusal)


def check_arguments(engine_args: Any) -> None:
    """Refuse engine options that do not go with trees.

    Runs before vLLM's own checks, which would refuse some of these for unrelated reasons.

    Args:
        engine_args: vLLM's EngineArgs.
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
    """Check the finished configuration of an engine that uses method "bastion".

    Raises:
        BastionConfigError: an option is in the way, or the batch token limit is too small.
    """
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
    """Refuse a file that is missing or no profile now, and not when all weights are loaded."""
    try:
        check_setting(setting)
    except ProfileError as error:
        raise BastionConfigError(str(error)) from error


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
    """A tree and its root must fit into a context: a warm-up step would write behind its blocks."""
    if nodes + 1 > max_model_len:
        raise BastionConfigError(
            f'"num_speculative_tokens": {nodes} does not fit into max_model_len {max_model_len}: '
            f"lower it to at most {max_model_len - 1}, or raise max_model_len"
        )


def too_few_rows_for_adapters(engine_args: Any) -> BastionConfigError:
    """What to say where vLLM refuses adapters, because a step cannot hold every request's nodes.

    Args:
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

    Args:
        layers: the target's attention layers by name, the drafter's left out.
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
