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
from vllm_bastion.validate import BastionConfigError

METHOD = "bastion"

_SHORT_FLAGS = (
    ("--spec-method", "method", "spec_method"),
    ("--spec-model", "model", "spec_model"),
    ("--spec-tokens", "num_speculative_tokens", "spec_tokens"),
)


_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
# vLLM's worker, by the platform's choice -> ours
_WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_bastion.hooks.worker.BastionWorker",
    _CPU_WORKER: "vllm_bastion.hooks.cpu_worker.BastionCPUWorker",
}
# With LoRA vLLM requires a step to hold N + 1 query tokens of every request; its defaults hold 8.
_NODES_WITH_ADAPTERS = 7


def requested(engine_args: Any) -> bool:
    """Whether these arguments ask for method "bastion"."""
    keys = getattr(engine_args, "speculative_config", None)
    method = keys.get("method") if isinstance(keys, dict) else None
    return METHOD in (method, getattr(engine_args, "spec_method", None))


def _merged(engine_args: Any) -> dict[str, Any]:
    """The user's keys with the short flags, hyphens replaced as in vLLM, and nulls left out."""
    config = engine_args.speculative_config or {}
    merged = {key.replace("-", "_"): value for key, value in config.items() if value is not None}
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
    from vllm_bastion.checkpoints.drafter_types import architectures_of, drafter_type_of
    from vllm_bastion.config import BastionSpeculativeConfig, default_nodes
    from vllm_bastion.validate import arguments, engine, models

    keys, target = _merged(self), target_model_config
    arguments.check_keys(keys)
    arguments.check_options(self, keys)
    models.check_target(target)
    drafter = _drafter_config(keys, target)
    models.check_drafter(drafter, keys, target)
    drafter_type = drafter_type_of(architectures_of(drafter))
    assert drafter_type is not None
    if "num_speculative_tokens" not in keys:
        limit = self.max_num_batched_tokens or target.max_model_len
        nodes = default_nodes(keys, drafter, min(target.max_model_len, limit))
        if self.enable_lora and keys.get("bastion_budget", "adaptive") == "adaptive":
            rows, requests = self.max_num_batched_tokens, self.max_num_seqs
            most = rows // requests - 1 if rows and requests else _NODES_WITH_ADAPTERS
            nodes = max(min(nodes, most), 1)
        keys["num_speculative_tokens"] = nodes
    settings = BastionSpeculativeConfig(
        **(keys | {"method": drafter_type.method}),
        target_model_config=target,
        target_parallel_config=target_parallel_config,
    )
    if self.max_num_batched_tokens:
        engine.check_rows(settings, self.max_num_batched_tokens)
    return settings


def _drafter_config(keys: dict[str, Any], target_model_config: Any) -> Any:
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    from vllm_bastion.checkpoints.drafter_types import restore_settings
    from vllm_bastion.validate import models

    name, revision = keys["model"], keys.get("revision")
    models.check_type(get_hf_file_to_dict("config.json", name, revision) or {}, name)
    config = get_config(
        name,
        trust_remote_code=target_model_config.trust_remote_code,
        revision=revision,
        code_revision=keys.get("code_revision"),
    )
    restore_settings(config, name, revision)
    return config


def create_engine_config(
    original: Callable[..., Any], self: Any, usage_context: Any = None, headless: bool = False
) -> Any:
    """Check the finished configuration before any process is started for it."""
    if not requested(self):
        vllm_config = original(self, usage_context, headless)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == _CPU_WORKER and runs_on_replacement(vllm_config):
            parallel.worker_cls = "vllm_bastion.hooks.cpu_worker.ReplacementWorker"
        return vllm_config
    from vllm.usage.usage_lib import UsageContext

    try:
        vllm_config = original(self, usage_context, headless)
        from vllm_bastion.validate.engine import check_engine

        check_engine(vllm_config)
        use_own_classes(vllm_config)
    except (BastionConfigError, compat.UnsupportedVllmError) as error:
        if usage_context != UsageContext.OPENAI_API_SERVER:
            raise
        # Status 1 and one sentence, without the traceback of an exception.
        raise SystemExit(f"vllm serve: {error}") from None
    if vllm_config.lora_config is not None:
        # vLLM maps rows to adapters on the host, which must know each request's rows.
        vllm_config.speculative_config.bastion_budget_timing = "exact"
    # vLLM 0.33 lowers it to fit its drafter's buffers; ours hold `max_num_seqs` requests.
    vllm_config.scheduler_config.max_num_active_seqs = self.max_num_active_seqs
    return vllm_config


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


def runs_on_replacement(vllm_config: Any) -> bool:
    """Whether V2 runs on our CPU replacements: on a CPU host without a Triton back end, for method
    "bastion" or with VLLM_USE_V2_MODEL_RUNNER=1."""
    from vllm import envs

    from vllm_bastion.config import bastion_config
    from vllm_bastion.platform import current_host

    if not current_host().needs_replacements():
        return False
    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(wanted) or (wanted is None and bastion_config(vllm_config) is not None)


def use_v2_model_runner(original: Callable[..., bool], self: Any) -> bool:
    """Select V2 where our replacements serve it; the validation refuses what V2 cannot do."""
    return runs_on_replacement(self) or original(self)


def validate_v2_model_runner(original: Callable[..., None], self: Any) -> None:
    """vLLM's own checks, except the one for Triton."""
    if not runs_on_replacement(self):
        original(self)
        return
    unsupported = self._get_v2_model_runner_unsupported_features()
    for option in ("enable_trace_replay", "enable_prompt_embeds", "use_fp64_gumbel"):
        if getattr(self.model_config, option, False):
            unsupported = [*unsupported, f"{option} on a CPU"]
    if unsupported:
        raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")


def rebind_kernels(original: Callable[..., None], overrides: Any) -> None:
    """Let vLLM's scan of all modules get past llvmlite.

    llvmlite's library object resolves unknown attributes, `__dict__` too, as C functions and fails.
    An entry in its table of functions is found first.
    """
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        functions = getattr(ffi.lib, "_fntab", None)
        if isinstance(functions, dict):
            functions.setdefault("__dict__", {})
    original(overrides)


def use_own_classes(vllm_config: Any) -> None:
    """Let the engine build our subclasses of vLLM's scheduler and worker, and tree attention.

    Raises:
        BastionConfigError: the user, or this platform, has named others.
    """
    from vllm_bastion.platform import current_host

    if vllm_config.attention_config.backend is None:
        vllm_config.attention_config.backend = current_host().default_attention_backend()
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    worker = _WORKERS.get(parallel.worker_cls)
    for option, other in (("scheduler-cls", scheduler.scheduler_cls),
                          ("worker-cls", None if worker else parallel.worker_cls)):  # fmt: skip
        if other is not None:
            raise BastionConfigError(
                f'method "bastion" has a scheduler and a worker of its own: leave out --{option} '
                f"({other})"
            )
    name = "BastionAsyncScheduler" if scheduler.async_scheduling else "BastionScheduler"
    scheduler.scheduler_cls = f"vllm_bastion.hooks.scheduler.{name}"
    parallel.worker_cls = worker
