# SPDX-License-Identifier: Apache-2.0
"""Checks of what the user wrote in `speculative_config`: names, types, ranges and values."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from vllm_bastion.checks import BastionConfigError
from vllm_bastion.config import (
    PREFIX,
    default_of,
    key_adapter,
    key_choices,
    literals,
    standard_keys,
    user_keys,
)
from vllm_bastion.platform import current_host

METHOD = "bastion"

# vLLM's own keys for which trees support only one value: key -> (that value, why).
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
# What to set instead of a key that does nothing.
_INSTEAD = {"enforce_eager": "set the engine's enforce_eager"}

# Keys of earlier versions, and why they left.
_LEFT = {"bastion_calibration": "each start measures its step costs, and no file holds them"}

_DOES_NOT_WORK = 'does not work with method "bastion"'


def refuse_other_spelling(given: dict[str, Any]) -> None:
    """Refuse our keys, or a misspelt name of the method, in an engine of another method."""
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
    """Check a speculative configuration, hyphens already replaced by underscores."""
    known = (*user_keys(), *standard_keys())
    for key in given:
        if key in _LEFT:
            raise BastionConfigError(f'the key "{key}" has left ({_LEFT[key]}): remove it')
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
    if given.get("kv_cache_dtype") is not None:
        _check_cache_dtype(given["kv_cache_dtype"])
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


def _check_cache_dtype(name: Any) -> None:
    """Refuse what no KV cache has. vLLM 0.33 checks the engine's key, but not the drafter's."""
    from vllm.config import CacheConfig

    try:
        CacheConfig(cache_dtype=name)
    except ValueError:
        raise BastionConfigError(
            f'"kv_cache_dtype": {name!r} in speculative_config is unknown to vLLM: remove it, or '
            "name one that the engine's kv_cache_dtype can have"
        ) from None


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
