# SPDX-License-Identifier: Apache-2.0
"""vLLM's options of a command, as the arguments of an engine with method "bastion"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def engine_arguments(
    command: str, target: str, drafter: str, options: Sequence[str], **keys: Any
) -> EngineArgs:
    """Parse vLLM's options; wrong ones end the process with status 2, as argparse does.

    Args:
        command: name of ours, for argparse's messages.
        target: model name or folder.
        drafter: likewise.
        options: vLLM's own; `--speculative-config` may hold further keys.
        keys: defaults of the speculative configuration.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"vllm-bastion {command}"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", target, *options]))
    given = dict(args.speculative_config or {})
    args.speculative_config = {**keys, **given, "method": "bastion", "model": drafter}
    return args
