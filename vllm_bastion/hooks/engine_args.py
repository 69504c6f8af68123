# SPDX-License-Identifier: Apache-2.0
"""Hooks between the user's arguments and a VllmConfig.

`EngineArgs.create_speculative_config` is the only place where user input becomes a speculative
configuration: `LLM(speculative_config=...)`, `--speculative-config`, `-sc`, the dotted form and the
short flags `--spec-*` all pass through it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_bastion import compat
from vllm_bastion.versions import capabilities

METHOD = "bastion"

_SHORT_FLAGS = (
    ("--spec-method", "method", "spec_method"),
    ("--spec-model", "model", "spec_model"),
    ("--spec-tokens", "num_speculative_tokens", "spec_tokens"),
)


# Of vLLM's message when a step cannot hold all drafts of an engine with adapters.
_LORA_REFUSAL = "decreasing num_speculative_tokens"


def requested(engine_args: Any) -> bool:
    """Whether these arguments ask for method "bastion"."""
    keys = getattr(engine_args, "speculative_config", None)
    method = keys.get("method") if isinstance(keys, dict) else None
    return METHOD in (method, getattr(engine_args, "spec_method", None))


def _merged(engine_args: Any) -> dict[str, Any]:
    """The user's keys with the short flags, hyphens replaced, as vLLM's original merges them."""
    config = engine_args.speculative_config or {}
    merged = {key.replace("-", "_"): value for key, value in config.items()}
    for flag, key, attribute in _SHORT_FLAGS:
        value = getattr(engine_args, attribute)
        if value is None:
            continue
        if key in merged:
            raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
        merged[key] = value
    return merged


def create_speculative_config(
    original: Callable[..., Any],
    self: Any,
    target_model_config: Any,
    target_parallel_config: Any,
) -> Any:
    """Build our configuration if method "bastion" is requested."""
    if not requested(self):
        return original(self, target_model_config, target_parallel_config)
    compat.require()
    # Imported late: these modules may not import on an unsupported vLLM.
    from vllm_bastion import hooks, validation
    from vllm_bastion.config import BastionSpeculativeConfig, default_nodes
    from vllm_bastion.drafter_kinds import architectures_of, gamma_of, kind_of
    from vllm_bastion.drafter_models import teach_drafters

    hooks.require_all()
    keys = _merged(self)
    validation.check_user_keys(keys)
    validation.check_host()
    validation.check_arguments(self)
    validation.check_target(target_model_config)
    teach_drafters()
    drafter = _drafter_config(keys, target_model_config)
    validation.check_drafter(drafter, keys["model"], target_model_config)
    kind, gamma = kind_of(architectures_of(drafter)), gamma_of(drafter)
    assert kind is not None and gamma is not None
    length, limit = target_model_config.max_model_len, self.max_num_batched_tokens
    if keys.get("num_speculative_tokens") is None:
        room = length if limit is None else min(length, limit)
        keys["num_speculative_tokens"] = default_nodes(keys, drafter, room)
    validation.check_token_limit(keys["num_speculative_tokens"], gamma, limit)
    validation.check_length(keys["num_speculative_tokens"], length)
    keys["method"] = kind.method
    config = BastionSpeculativeConfig(
        **keys,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
    )
    # vLLM may raise it in the config that it loads the drafter with.
    config.drafter_positions = getattr(drafter, "max_position_embeddings", None)
    return config


def _drafter_config(keys: dict[str, Any], target_model_config: Any) -> Any:
    from vllm.transformers_utils.config import get_config

    from vllm_bastion.drafter_kinds import restore_settings
    from vllm_bastion.validation import BastionConfigError

    try:
        config = get_config(
            keys["model"],
            trust_remote_code=target_model_config.trust_remote_code,
            revision=keys.get("revision"),
            code_revision=keys.get("code_revision"),
        )
        restore_settings(config, keys["model"], keys.get("revision"))
        return config
    except Exception as error:
        _refuse_by_file(keys)
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise BastionConfigError(
            f'the drafter "model": "{keys["model"]}" could not be read ({first_line}): give the '
            "path or the Hugging Face name of a DFlash checkpoint"
        ) from error


def _refuse_by_file(keys: dict[str, Any]) -> None:
    """Refuse a drafter that vLLM cannot read by the name that its config.json has, if any."""
    from transformers import PretrainedConfig

    from vllm_bastion.validation import refuse_other_family

    try:
        written, _ = PretrainedConfig.get_config_dict(keys["model"], revision=keys.get("revision"))
    except Exception:  # the first error says more
        return
    refuse_other_family(written, keys["model"])


def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the finished configuration before any process is started for it."""
    try:
        vllm_config = original(self, *args, **kwargs)
    except ValueError as error:
        if requested(self) and self.enable_lora and _LORA_REFUSAL in str(error):
            from vllm_bastion import validation

            raise validation.too_few_rows_for_adapters(self) from error
        raise
    if requested(self):
        from vllm_bastion import validation

        validation.check_engine(vllm_config)
        prefer_flash_attention(vllm_config)
        if vllm_config.lora_config is not None:
            # vLLM maps rows to adapters on the host, which must know each request's rows.
            vllm_config.speculative_config.bastion_budget_timing = "exact"
        # vLLM 0.33 lowers it to fit its drafter's buffers; ours hold `max_num_seqs` requests.
        vllm_config.scheduler_config.max_num_active_seqs = self.max_num_active_seqs
    return vllm_config


def prefer_flash_attention(vllm_config: Any) -> None:
    """Use the backend that tree attention replaces, unless the user named one."""
    from vllm_bastion.platform import current_host

    attention_config = vllm_config.attention_config
    if attention_config.backend is None:
        attention_config.backend = current_host().default_attention_backend()


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Let `--spec-method` accept "bastion": the parser only knows vLLM's own methods."""
    parser = original(parser)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices:
            action.choices = [*action.choices, METHOD]
    return parser


def num_lookahead_tokens(original: Callable[..., int], self: Any) -> int:
    """Cache slots beyond the target's rows: the drafter writes gamma + 1, whatever N is."""
    from vllm_bastion.config import bastion_config

    spec_config = bastion_config(self)
    return original(self) if spec_config is None else spec_config.bastion_gamma + 1


def runs_on_twins(vllm_config: Any) -> bool:
    """Whether V2 runs on our native twins: on a CPU host without a Triton back end, for method
    "bastion" or with VLLM_USE_V2_MODEL_RUNNER=1."""
    from vllm import envs

    from vllm_bastion.config import bastion_config
    from vllm_bastion.platform import current_host

    if not current_host().needs_twins():
        return False
    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(wanted) or (wanted is None and bastion_config(vllm_config) is not None)


def use_v2_model_runner(original: Callable[..., bool], self: Any) -> bool:
    """Select V2 where our twins serve it; the validation refuses what V2 cannot do."""
    if not runs_on_twins(self):
        return original(self)
    worker: Any = sys.modules.get("vllm.v1.worker.gpu_worker")
    # The worker calls this just before it checks HAS_TRITON, which only that check reads.
    # Do not import the module here: the platform's own patches must come first.
    if worker is not None and capabilities().worker_requires_triton:
        worker.HAS_TRITON = True
    return True


def validate_v2_model_runner(original: Callable[..., None], self: Any) -> None:
    """vLLM's own checks, except the one for Triton."""
    if not runs_on_twins(self):
        original(self)
        return
    unsupported = self._get_v2_model_runner_unsupported_features()
    if unsupported:
        raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
