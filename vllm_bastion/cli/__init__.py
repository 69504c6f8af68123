# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion check | calibrate | show | page`; `python -m vllm_bastion` is the same command.

This module imports no vLLM: `show` works beside any vLLM, or none. The other commands import it
when they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_bastion import __version__, compat, envs
from vllm_bastion.checkpoints import files
from vllm_bastion.cli.curves import check_context, check_matplotlib, curves, draw_png, draw_text
from vllm_bastion.cli.profile import conclusion, newest_profile, profile_text, table_text
from vllm_bastion.logger import quiet
from vllm_bastion.page import DEFAULT_URL, serve
from vllm_bastion.policy.cost.store import ProfileError, read_profile

_DESCRIPTION = "Check, measure and explain engines that decode with draft trees."
_PASSED_ON = "[vLLM options]: all others go to vLLM, for example --tensor-parallel-size 2."
# Commands that pass unknown options on to vLLM.
_WITH_ENGINE = ("check", "calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for a refusal or a failure, 2 for wrong usage."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in _WITH_ENGINE:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
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

    def engine_command(
        name: str, run: Callable[[argparse.Namespace, list[str]], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_PASSED_ON,
            usage=f"vllm-bastion {name} [-h] [options] TARGET DRAFTER [vLLM options]",
        )
        command.add_argument("target", help="target model: name or folder")
        command.add_argument("drafter", help="drafter of that target: name or folder")
        command.set_defaults(run=run)
        return command

    engine_command("check", _check, "say from the configs alone what would be served, and how")
    calibrate = engine_command(
        "calibrate", _calibrate, "start an engine, measure its steps and store the profile"
    )
    calibrate.add_argument(
        "--out", type=Path, help="file to write; default: one in the cache, which starts then read"
    )
    page = commands.add_parser("page", help="show a server's metrics as a live page")
    page.add_argument("url", nargs="?", default=DEFAULT_URL, help="default: %(default)s")
    page.add_argument("--port", type=int, default=0, help="of the page; default: a free one")
    page.set_defaults(run=lambda arguments, _: serve(arguments.url, arguments.port))
    show = commands.add_parser("show", help="print a profile, and draw C(N) and the break-even")
    show.add_argument(
        "profile", type=Path, nargs="?", help="a file; default: the newest in the cache"
    )
    show.add_argument(
        "--context",
        type=float,
        help="cached tokens per request in the figure; default: the fewest that were measured",
    )
    show.add_argument("--table", action="store_true", help="also print what was measured")
    show.add_argument("--png", type=Path, help="also write the figure to this file")
    show.set_defaults(run=_show)
    return parser


def _check(arguments: argparse.Namespace, engine_args: list[str]) -> int:
    envs.quiet()
    quiet()
    return 0 if _would_start(arguments, engine_args) else 1


def _calibrate(arguments: argparse.Namespace, engine_args: list[str]) -> int:
    if arguments.out is not None:
        _check_file("--out", arguments.out)
    if not _would_start(arguments, engine_args):
        return 1
    from vllm_bastion.cli.calibrate import calibrate

    profile, path = calibrate(arguments.target, arguments.drafter, arguments.out, engine_args)
    print(f"\n{conclusion(profile)}\n\nProfile: {path}")
    return 0


def _would_start(arguments: argparse.Namespace, engine_args: list[str]) -> bool:
    """Print what would be served, or why nothing would be; see `check`."""
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
    return report.refusal is None


def _check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before minutes of work. Creates no folder."""
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(f"{option}: {path} is a folder; name a file")
    if not folder.is_dir():
        raise FileNotFoundError(f"{option}: there is no folder {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{option}: {path} cannot be written")


def _check_models(arguments: argparse.Namespace) -> None:
    """Refuse anything but a model's folder or name, and a vLLM that is not supported."""
    for role in ("target", "drafter"):
        name = getattr(arguments, role)
        if not files.is_name(name):  # names are checked with the configuration
            files.check_readable(role, name)
    problem = compat.version_problem(compat.vllm_version())
    if problem is not None:
        raise RuntimeError(problem)


def _show(arguments: argparse.Namespace, _: list[str]) -> int:
    check_context(arguments.context)
    if arguments.png is not None:
        _check_file("--png", arguments.png)
        check_matplotlib()
    path = arguments.profile or newest_profile()
    try:
        profile = read_profile(path)
    except ProfileError as error:
        raise RuntimeError(
            f"{path} cannot be shown ({error}): measure again, or name another"
        ) from error
    drawn = curves(profile.table, arguments.context)
    print(conclusion(profile, arguments.context))
    print(f"\n{profile_text(profile)}\nfile       {path}\n\n{draw_text(drawn)}")
    if arguments.table:
        print(f"\n{table_text(profile)}")
    if arguments.png is not None:
        draw_png(drawn, arguments.png)
        print(f"\nFigure: {arguments.png}")
    return 0
