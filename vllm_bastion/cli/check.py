# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check`: what an engine would serve, from the models' configs alone.

The arguments become vLLM's own configuration, with all checks of a start. No process is started, no
weight is read and nothing is downloaded but configs and the headers of the drafter's files. What
only a loaded model shows (layers that tree attention does not implement) is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_bastion import hooks
from vllm_bastion.checkpoints import files
from vllm_bastion.checks.models import thinking_note
from vllm_bastion.cli.arguments import engine_arguments
from vllm_bastion.cli.memory import Memory, memory_of
from vllm_bastion.config import BastionSpeculativeConfig, host_choices, is_lagged, settings_of
from vllm_bastion.platform import current_host

_NOT_LOADED = "the plugin is not loaded: VLLM_PLUGINS, if it is set, must name bastion"


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        refusal: why the engine would not start, in vLLM's or our words; None if it would.
        lines: (heading, text) in the order to print.
        memory: what it needs beyond plain decoding; None for a refused engine.
    """

    refusal: str | None
    lines: tuple[tuple[str, str], ...] = ()
    memory: Memory | None = None

    def text(self) -> str:
        """For a terminal."""
        if self.refusal is not None:
            return f"refused    {self.refusal}"
        return "\n".join(f"{heading:11s}{text}" for heading, text in self.lines)


def check(target: str, drafter: str, engine_args: Sequence[str]) -> Report:
    """Check a pair and vLLM's options.

    Args:
        target: model name or folder.
        drafter: likewise.
        engine_args: vLLM's own options; `--speculative-config` may hold further keys.
    """
    for role, name in (("target", target), ("drafter", drafter)):
        try:
            files.check_readable(role, name)
        except files.UnreachableError as error:  # vLLM would wait for the network again
            return Report(refusal=str(error))
        except files.UnreadableError:  # vLLM knows more kinds of names
            pass
    args = engine_arguments("check", target, drafter, engine_args)
    try:
        # vLLM loads its plugins when it makes the arguments.
        if not hooks.is_wrapped(hooks.ENTRY.target):
            return Report(refusal=_NOT_LOADED)
        return report_on(args.create_engine_config())
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        return Report(refusal=_sentence(error))


def _sentence(error: Exception) -> str:
    """The error's text without pydantic's frame around it."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        messages = [str(one.get("msg", "")) for one in errors()]
        return "; ".join(message.removeprefix("Value error, ") for message in messages)
    return str(error).strip() or type(error).__name__


def report_on(config: VllmConfig) -> Report:
    """The report on a finished configuration of method "bastion"."""
    spec = settings_of(config)
    memory = memory_of(config)
    lines = [
        ("served", f"{config.model_config.model} ({config.model_config.architecture})"),
        ("drafter", _drafter(spec)),
        ("trees", _trees(spec)),
        ("limits", _limits(config, spec)),
        ("kernels", _kernels(config)),
        *(("memory", line) for line in memory.lines()),
    ]
    if config.model_config.logits_processors:
        lines.append(("note", "a custom logits processor makes every tree a chain"))
    model = config.model_config
    note = thinking_note(model.model, model.revision, str(spec.model))
    if note is not None:
        lines.append(("note", note))
    warning = current_host().warning()
    if warning is not None:
        lines.append(("note", warning))
    return Report(None, tuple(lines), memory)


def _drafter(spec: BastionSpeculativeConfig) -> str:
    names = "+".join(spec.draft_model_config.hf_config.architectures)
    return f"{spec.model} ({names}), gamma {spec.bastion_gamma}"


def _trees(spec: BastionSpeculativeConfig) -> str:
    timing = (
        f" ({'lagged' if is_lagged(spec) else 'exact'})"
        if spec.bastion_budget == ("adaptive")
        else ""
    )
    return (
        f"N {spec.num_speculative_tokens}, K {spec.bastion_top_k}, "
        f"budget {spec.bastion_budget}{timing}"
    )


def _limits(config: VllmConfig, spec: BastionSpeculativeConfig) -> str:
    scheduler = config.scheduler_config
    rows, nodes = scheduler.max_num_batched_tokens, spec.num_speculative_tokens
    whole = rows // (1 + nodes)
    return (
        f"{rows} rows a step (max_num_batched_tokens) hold {min(whole, scheduler.max_num_seqs)} of "
        f"{scheduler.max_num_seqs} requests (max_num_seqs) with N nodes each, or one with "
        f"{rows - 1 - spec.bastion_gamma}; {config.model_config.max_model_len} tokens a request"
    )


def _kernels(config: VllmConfig) -> str:
    compiled = config.compilation_config
    graphs = compiled.cudagraph_mode.name
    parts = [
        f"tree attention in place of vLLM's {_vllm_backend(config).get_name()}",
        "eager" if compiled.mode.name == "NONE" else "compiled by torch.compile",
    ]
    if current_platform.is_cuda_alike():
        parts.append("no CUDA graphs" if graphs == "NONE" else f"CUDA graphs {graphs}")
    if current_host().needs_twins():
        parts.append("C++ in place of vLLM's Triton kernels")
    return "; ".join([*parts, *host_choices(config).texts()])


def _vllm_backend(config: VllmConfig) -> type[Any]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    named = config.attention_config.backend or current_host().default_attention_backend()
    if named is None:  # a CPU host leaves it to vLLM, which has one
        named = AttentionBackendEnum["CPU_ATTN"]
    backend: type[Any] = named.get_class()
    return backend
