# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check`: what an engine would serve, from the models' configs alone.

The arguments become vLLM's own configuration, as at a start and with the same checks. No process is
started and no weight is read, so the layers of the loaded target are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_bastion.config import BastionSpeculativeConfig, is_lagged, settings_of
from vllm_bastion.platform import current_host


def check(target: str, drafter: str, options: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Check a pair and vLLM's options; `--speculative-config` may hold further keys.

    target, drafter: folders or names.

    Returns:
        (heading, text) in the order to print; "refused" and why, if a start would fail.
    """
    try:
        arguments = _engine_arguments(target, drafter, options)
        return _lines(arguments.create_engine_config())
    except ValidationError as error:
        found = [(*map(str, one["loc"]), one["msg"]) for one in error.errors()]
        refusal = "; ".join(": ".join(parts) for parts in found)
        return (("refused", refusal.replace("Value error, ", "")),)
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        return (("refused", str(error).strip() or type(error).__name__),)


def _engine_arguments(target: str, drafter: str, options: Sequence[str]) -> EngineArgs:
    """Parse vLLM's options. Wrong ones end the process with status 2, as in argparse."""
    prog = "vllm-bastion check"
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=prog))

    def error(message: str) -> NoReturn:
        # vLLM names a function of Python's, and its usage text has hundreds of lines.
        message = re.sub(r"cannot be converted to <function loads .*?>\.", "is not JSON", message)
        print(f"{prog}: {message}; 'vllm serve --help=all' lists vLLM's options", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", target, *options]))
    given = args.speculative_config or {}
    args.speculative_config = {**given, "method": "bastion", "model": drafter}
    return args


def _lines(config: VllmConfig) -> tuple[tuple[str, str], ...]:
    spec, model = settings_of(config), config.model_config
    names = "+".join(spec.draft_model_config.hf_config.architectures)
    notes = [current_host().warning()]
    if model.logits_processors:
        notes.append("a custom logits processor makes every tree a chain")
    return (
        ("served", f"{model.model} ({model.architecture})"),
        ("drafter", f"{spec.model} ({names}), gamma {spec.bastion_gamma}"),
        ("trees", _trees(spec)),
        ("limits", _limits(config, spec)),
        ("kernels", _kernels(config)),
        *(("note", note) for note in notes if note is not None),
    )


def _trees(spec: BastionSpeculativeConfig) -> str:
    nodes, top_k, budget = spec.num_speculative_tokens, spec.bastion_top_k, spec.bastion_budget
    timing = f" ({'lagged' if is_lagged(spec) else 'exact'})" if budget == "adaptive" else ""
    return f"N {nodes}, K {top_k}, budget {budget}{timing}"


def _limits(config: VllmConfig, spec: BastionSpeculativeConfig) -> str:
    scheduler = config.scheduler_config
    rows, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    whole = min(rows // (1 + spec.num_speculative_tokens), requests)
    return (
        f"{rows} rows a step (max_num_batched_tokens) hold {whole} of {requests} requests "
        f"(max_num_seqs) with N nodes each, or one with {rows - 1 - spec.bastion_gamma}; "
        f"{config.model_config.max_model_len} tokens a request"
    )


def _kernels(config: VllmConfig) -> str:
    compilation = config.compilation_config
    backend = config.attention_config.backend  # a CPU host leaves it to vLLM, which has one
    graphs = compilation.cudagraph_mode.name
    parts = [
        f"tree attention in place of vLLM's {'CPU_ATTN' if backend is None else backend.name}",
        "eager" if compilation.mode.name == "NONE" else "compiled by torch.compile",
    ]
    if current_platform.is_cuda_alike():
        parts.append("no CUDA graphs" if graphs == "NONE" else f"CUDA graphs {graphs}")
    if current_host().needs_replacements():
        parts.append("C++ in place of vLLM's Triton kernels")
    weights = settings_of(config).bastion_drafter_weights
    return "; ".join([*parts, *current_host().choices(weights, config.model_config.dtype)])
