# SPDX-License-Identifier: Apache-2.0
"""Validates what the user wrote: `speculative_config`, and vLLM's options beside it."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from vllm_bastion.config import default_of, key_adapter, standard_keys, user_keys
from vllm_bastion.platform import current_host
from vllm_bastion.validate import BastionConfigError

METHOD = "bastion"
_NODES = "num_speculative_tokens"

# vLLM's own keys that method "bastion" reads; all others must have their defaults.
_READ_KEYS = frozenset({
    "attention_backend", "code_revision", "draft_load_config", "draft_tensor_parallel_size",
    "dspark_draft_topk", "kv_cache_dtype", "max_model_len", "method", "model", "moe_backend",
    _NODES, "quantization", "revision",
})  # fmt: skip
# The reason, for keys and options whose refusal needs one.
_REASONS = {
    "draft_sample_method": "a tree holds the drafter's best candidates, not samples",
    "rejection_sample_method": "the path follows the target's own samples",
    "enable_adaptive_verification": "trees are sized by their own budget",
    "use_heterogeneous_vocab": "drafter and target must share a vocabulary",
    "use_local_argmax_reduction": "a tree needs more than the best token of a position",
    "num_speculative_tokens_per_batch_size": "the batch shares one budget",
    "enforce_eager": "it is an option of the engine",
    "pipeline_parallel_size": "only the last stage knows how many nodes a step verifies, and which "
    "of them it accepts",
}
# Options of EngineArgs that a tree cannot serve -> the value that switches them off.
_OPTIONS_OFF: dict[str, Any] = {
    "pipeline_parallel_size": 1,
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


def check_keys(keys: dict[str, Any]) -> None:
    """Check a speculative configuration, hyphens already replaced and nulls left out."""
    known = (*user_keys(), *standard_keys())
    for key, value in keys.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(user_keys())}"
            raise BastionConfigError(f'unknown key "{key}" in speculative_config: {hint}')
        if key in user_keys() or key == _NODES:
            _check_type(key, value)
        elif key not in _READ_KEYS and value != default_of(key):
            raise _does_not_work(f'"{key}": {value!r}', key, "remove it")
    if not keys.get("model"):
        raise BastionConfigError(
            'method "bastion" needs "model" in speculative_config: the path or the Hugging Face '
            "name of a DFlash drafter trained for the target"
        )
    nodes, budget = keys.get(_NODES), keys.get("bastion_budget")
    if isinstance(budget, int) and nodes is not None and budget > nodes:
        raise BastionConfigError(
            f'"bastion_budget": {budget} is more than "{_NODES}": {nodes}: lower the first or '
            "raise the second"
        )


def _check_type(key: str, value: Any) -> None:
    # vLLM would convert "8" and True.
    try:
        key_adapter(key).validate_python(value)
    except ValidationError as error:
        wanted = " or ".join(one["msg"].removeprefix("Input should be ") for one in error.errors())
        raise BastionConfigError(f'"{key}": {value!r} should be {wanted}') from None


def check_options(engine_args: Any, keys: dict[str, Any]) -> None:
    """Refuse options of vLLM's EngineArgs that do not go with trees.

    Runs before vLLM's own checks, which would refuse some of these for unrelated reasons.
    """
    own = keys.get("draft_tensor_parallel_size")
    if own not in (None, engine_args.tensor_parallel_size):
        raise BastionConfigError(
            f'"draft_tensor_parallel_size": {own!r} does not work with method "{METHOD}", whose '
            f"drafter is split as the target is ({engine_args.tensor_parallel_size}): remove it"
        )
    quantization = str(keys.get("quantization"))
    if "fp8" in quantization and not current_host().serves_float8_products:
        raise BastionConfigError(
            f'"quantization": "{quantization}" needs a GPU; on a CPU a bf16 drafter multiplies in '
            'int8 already ("bastion_drafter_weights": "auto"): remove it'
        )
    for option, off in _OPTIONS_OFF.items():
        value = getattr(engine_args, option)
        if value is not None and value != off:
            raise _does_not_work(option, option, f"set it to {off}" if off else "remove it")


def _does_not_work(what: str, name: str, way_out: str) -> BastionConfigError:
    why = f", because {_REASONS[name]}" if name in _REASONS else ""
    return BastionConfigError(f'{what} does not work with method "{METHOD}"{why}: {way_out}')
