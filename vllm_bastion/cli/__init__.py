# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check`; `python -m vllm_bastion` is the same command.

This module imports no vLLM, so that one that cannot be imported is told in a sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from vllm_bastion import __version__, compat, envs
from vllm_bastion.checkpoints import files
from vllm_bastion.logger import quiet

_DESCRIPTION = "Check engines that decode with draft trees."
_PASSED_ON = "[vLLM options]: all others go to vLLM, for example --tensor-parallel-size 2."


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for a refusal or a failure, 2 for wrong usage."""
    arguments, rest = _parser().parse_known_args(argv)
    run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
    try:
        return run(arguments, rest)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"vllm-bastion {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-bastion", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    text = "say from the configs alone what would be served, and how"
    check = commands.add_parser(
        "check",
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_PASSED_ON,
        usage="vllm-bastion check [-h] TARGET DRAFTER [vLLM options]",
    )
    check.add_argument("target", help="target model: name or folder")
    check.add_argument("drafter", help="drafter of that target: name or folder")
    check.set_defaults(run=_check)
    return parser


def _check(arguments: argparse.Namespace, engine_args: list[str]) -> int:
    """Print what would be served, or why nothing would be; see `cli.check`."""
    envs.quiet()
    quiet()
    _check_models(arguments)
    try:
        from vllm_bastion.cli.check import check
    except ImportError as error:
        raise RuntimeError(
            f"vLLM cannot be imported here ({error}): repair its installation, or run this command "
            "in the environment that serves"
        ) from error
    report = check(arguments.target, arguments.drafter, engine_args)
    print(report.text(), flush=True)
    return 0 if report.refusal is None else 1


def _check_models(arguments: argparse.Namespace) -> None:
    """Refuse anything but a model's folder or name, and a vLLM that is not supported."""
    for role in ("target", "drafter"):
        name = getattr(arguments, role)
        if not files.is_name(name):  # names are checked with the configuration
            files.check_readable(role, name)
    problem = compat.version_problem(compat.vllm_version())
    if problem is not None:
        raise RuntimeError(problem)
