# SPDX-License-Identifier: Apache-2.0
"""vLLM's options of a command, as the arguments of an engine with method "bastion"."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_bastion.checkpoints import files


def engine_arguments(
    command: str, target: str, drafter: str, options: Sequence[str], **keys: Any
) -> EngineArgs:
    """Parse vLLM's options.

    Invalid ones end the process with status 2, as in argparse, but with one sentence: vLLM's usage
    text has hundreds of lines.

    Args:
        command: name of ours, for argparse's messages.
        target: model name or folder.
        drafter: likewise.
        options: vLLM's own; `--speculative-config` may hold further keys.
        keys: of the speculative configuration; they override the user's.
    """
    prog = f"vllm-bastion {command}"
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=prog))

    def error(message: str) -> NoReturn:
        print(f"{prog}: {message}; 'vllm serve --help=all' lists vLLM's options", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error
    parsed = parser.parse_args(["--model", target, *options])
    try:
        args = EngineArgs.from_cli_args(parsed)
    except (ValueError, OSError):
        # With HF_HUB_OFFLINE vLLM looks for the model here.
        files.check_readable("target", target)
        raise
    given = dict(args.speculative_config or {})
    args.speculative_config = {**given, **keys, "method": "bastion", "model": drafter}
    return args
