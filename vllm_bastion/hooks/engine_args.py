# SPDX-License-Identifier: Apache-2.0
"""Hooks on the way from the user's words to a VllmConfig.

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


def requested(engine_args: Any) -> bool:
    """Whether these arguments ask for method "bastion"."""
    given = getattr(engine_args, "speculative_config", None)
    in_config = given.get("method") if isinstance(given, dict) else None
    return METHOD in (in_config, getattr(engine_args, "spec_method", None))


def _merged(engine_args: Any) -> dict[str, Any]:
    """The user's keys, short flags included, hyphens replaced; what vLLM's original does first."""
    given = engine_args.speculative_config or {}
    merged = {key.replace("-", "_"): value for key, value in given.items()}
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
    """Build our configuration where method "bastion" is asked for."""
    if not requested(self):
        return original(self, target_model_config, target_parallel_config)
    compat.require()
    # Imported late: on an unsupported vLLM neither module may be importable.
    from vllm_bastion import hooks, validation
    from vllm_bastion.config import BastionSpeculativeConfig
    from vllm_bastion.drafter_kinds import gamma_of, kind_of

    hooks.require_all()
    given = _merged(self)
    validation.check_user_keys(given)
    validation.check_host()
    validation.check_arguments(self)
    validation.check_target(target_model_config)
    drafter = _drafter_config(given, target_model_config)
    validation.check_drafter(drafter, given["model"], target_model_config)
    kind, gamma = kind_of(drafter.architectures), gamma_of(drafter)
    assert kind is not None and gamma is not None
    validation.check_token_limit(
        given["num_speculative_tokens"], gamma, self.max_num_batched_tokens
    )
    given["method"] = kind.method
    return BastionSpeculativeConfig(
        **given,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
    )


def _drafter_config(given: dict[str, Any], target_model_config: Any) -> Any:
    from vllm.transformers_utils.config import get_config

    from vllm_bastion.drafter_kinds import restore_block_size
    from vllm_bastion.validation import BastionConfigError

    try:
        config = get_config(
            given["model"],
            trust_remote_code=target_model_config.trust_remote_code,
            revision=given.get("revision"),
            code_revision=given.get("code_revision"),
        )
        restore_block_size(config, given["model"], given.get("revision"))
        return config
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise BastionConfigError(
            f'the drafter "model": "{given["model"]}" could not be read ({first_line}): give the '
            "path or the Hugging Face name of a DFlash checkpoint"
        ) from error


def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the finished configuration before any process is started for it."""
    vllm_config = original(self, *args, **kwargs)
    if requested(self):
        from vllm_bastion import validation

        validation.check_engine(vllm_config)
        prefer_flash_attention(vllm_config)
        # vLLM 0.33 lowers it to what its drafter's buffers hold; ours hold `max_num_seqs` requests.
        vllm_config.scheduler_config.max_num_active_seqs = self.max_num_active_seqs
    return vllm_config


def prefer_flash_attention(vllm_config: Any) -> None:
    """Use the backend that tree attention replaces, where the user named none."""
    from vllm_bastion.platform import current_host

    attention_config = vllm_config.attention_config
    if attention_config.backend is None:
        attention_config.backend = current_host().default_attention_backend()


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Let `--spec-method` accept "bastion"; the parser checks against a list of vLLM's methods."""
    parser = original(parser)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices:
            action.choices = [*action.choices, METHOD]
    return parser


def num_lookahead_tokens(original: Callable[..., int], self: Any) -> int:
    """KV slots past the target's rows: the drafter writes gamma + 1 there, however large N is."""
    from vllm_bastion.config import bastion_config

    spec_config = bastion_config(self)
    return original(self) if spec_config is None else spec_config.bastion_gamma + 1


def runs_on_twins(vllm_config: Any) -> bool:
    """Whether V2 runs on our native kernels: a CPU host without a Triton back end, and method
    "bastion" or VLLM_USE_V2_MODEL_RUNNER=1."""
    from vllm import envs

    from vllm_bastion.config import bastion_config
    from vllm_bastion.platform import current_host

    if not current_host().needs_twins():
        return False
    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(asked) or (asked is None and bastion_config(vllm_config) is not None)


def use_v2_model_runner(original: Callable[..., bool], self: Any) -> bool:
    """V2 where our kernels serve it; what it cannot do is refused by the validation."""
    if not runs_on_twins(self):
        return original(self)
    worker: Any = sys.modules.get("vllm.v1.worker.gpu_worker")
    # The worker asks here just before it checks this name, which nothing else in its module reads.
    # Importing the module here would be too early: the platform's own patches come first.
    if worker is not None and capabilities().worker_requires_triton:
        worker.HAS_TRITON = True
    return True


def validate_v2_model_runner(original: Callable[..., None], self: Any) -> None:
    """vLLM's own check without the one for Triton."""
    if not runs_on_twins(self):
        original(self)
        return
    unsupported = self._get_v2_model_runner_unsupported_features()
    if unsupported:
        raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
