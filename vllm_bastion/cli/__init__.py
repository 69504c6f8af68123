# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check | page`; `python -m vllm_bastion` is the same command.

This module imports no vLLM, so that a missing or broken one is told in one sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from vllm_bastion import __version__, compat, envs
from vllm_bastion.logger import quiet
from vllm_bastion.page import DEFAULT_URL, serve


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for a refusal or a failure, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="vllm-bastion", description="Check engines that decode with draft trees."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="say from the configs alone what would be served, and how",
        description="Say from the configs alone what would be served, and how.",
        epilog="[vLLM options]: all others go to vLLM, for example --tensor-parallel-size 2.",
        usage="vllm-bastion check [-h] TARGET DRAFTER [vLLM options]",
    )
    check.add_argument("target", help="target model: name or folder")
    check.add_argument("drafter", help="drafter of that target: name or folder")
    check.set_defaults(run=_check)
    page = commands.add_parser("page", help="show a server's metrics as a live page")
    page.add_argument("url", nargs="?", default=DEFAULT_URL, help="default: %(default)s")
    page.add_argument("--port", type=int, default=0, help="of the page; default: a free one")
    page.set_defaults(run=lambda arguments, _: serve(arguments.url, arguments.port))
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "check":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
    try:
        return run(arguments, rest)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"vllm-bastion {arguments.command}: {error}", file=sys.stderr)
        return 1


def _check(arguments: argparse.Namespace, options: list[str]) -> int:
    problem = compat.version_problem(compat.vllm_version())
    if problem is not None:
        raise RuntimeError(problem)
    envs.quiet()
    quiet()
    try:
        from vllm_bastion.cli.check import check
    except ImportError as error:
        raise RuntimeError(
            f"vLLM cannot be imported here ({error}): repair its installation, or run this command "
            "in the environment that serves"
        ) from error
    lines = check(arguments.target, arguments.drafter, options)
    for heading, text in lines:
        print(f"{heading:11s}{text}")
    return int("refused" in dict(lines))
