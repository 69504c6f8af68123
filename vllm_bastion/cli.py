# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion calibrate | show`: measure the step times of an engine, and print them.

`show` needs neither vLLM nor a GPU. `python -m vllm_bastion` is the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_bastion import __version__, compat
from vllm_bastion.envs import cache_dir
from vllm_bastion.policy.cost.store import Profile, read_profile

_DESCRIPTION = "Measure the step times of an engine, and print them."


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "calibrate":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "calibrate":
            return _calibrate(arguments, rest)
        return _show(arguments)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"vllm-bastion {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-bastion", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    calibrate = commands.add_parser(
        "calibrate",
        help="start an engine, measure its steps and store the profile",
        description="All other options are passed to vLLM, for example --tensor-parallel-size 2.",
    )
    calibrate.add_argument("target", help="target model: name or folder")
    calibrate.add_argument("drafter", help="drafter of that target: name or folder")
    calibrate.add_argument("--out", type=Path, help="file to write; default: one in the cache")
    show = commands.add_parser("show", help="print a profile")
    show.add_argument(
        "profile", type=Path, nargs="?", help="a file; default: the newest in the cache"
    )
    return parser


def _calibrate(arguments: argparse.Namespace, engine_args: list[str]) -> int:
    for role in ("target", "drafter"):
        _check_folder(role, getattr(arguments, role))
    problem = compat.version_problem(compat.vllm_version())
    if problem is not None:
        raise RuntimeError(problem)
    try:
        from vllm_bastion.calibration.engine import main as calibrate
    except ImportError as error:
        raise RuntimeError(
            f"vLLM cannot be imported here ({error}): repair its installation, or run this command "
            "in the environment that serves"
        ) from error

    profile = calibrate(
        arguments.target, arguments.drafter, output=arguments.out, engine_args=engine_args
    )
    print(profile_text(profile))
    return 0


def _check_folder(role: str, name: str) -> None:
    """Refuse what can only be a folder and is none; vLLM would ask Hugging Face for it."""
    looks_like_folder = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if looks_like_folder and not Path(name).is_dir():
        raise FileNotFoundError(
            f"{role}: there is no folder {name}; give a model's folder or its Hugging Face name"
        )


def _show(arguments: argparse.Namespace) -> int:
    path = arguments.profile or newest_profile()
    profile = read_profile(path)
    print(path)
    print(profile_text(profile))
    return 0


def newest_profile() -> Path:
    """The profile in the cache that was written last.

    Raises:
        FileNotFoundError: the cache is empty; the message says how to make a profile.
    """
    profiles = sorted(cache_dir().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not profiles:
        raise FileNotFoundError(
            f"no latency profile in {cache_dir()}; run 'vllm-bastion calibrate TARGET DRAFTER' or "
            "name a file"
        )
    return profiles[-1]


def profile_text(profile: Profile) -> str:
    """A profile as text: what was measured, then a row per size, batch and context."""
    key, table = profile.key, profile.table
    lines = [
        f"device     {key.device}, tensor parallel {key.tp_size}, {key.dtype}",
        f"engine     vLLM {key.vllm_version}, vllm-bastion {key.package_version or 'unknown'}",
        f"attention  {key.attention_backend}",
        f"compiled   {key.compile_mode or 'unknown'}",
        f"target     {key.target_hash}, quantization {key.target_quantization or 'unknown'}",
        f"drafter    {key.drafter_hash}, quantization {key.drafter_quantization or 'unknown'}",
        f"measured   {profile.created}",
        f"graphs     {', '.join(map(str, table.captured_sizes)) or 'none'}",
        f"draft      {', '.join(f'{ms:.3f} ms at R={r}' for r, ms in table.drafter_samples)}",
        f"overhead   {table.aux_ms:.3f} ms (plain step {table.plain_aux_ms:.3f} ms)",
    ]
    if profile.rmse_before is not None and profile.rmse_after is not None:
        reduction = 100 * (1 - profile.rmse_after / profile.rmse_before)
        lines.append(
            f"roofline   RMSE on held-out points {profile.rmse_before:.3f} -> "
            f"{profile.rmse_after:.3f} ms ({reduction:.1f} % less)"
        )
    lines += ["", "  rows  reqs   context  measured ms  calibrated  roofline"]
    groups: dict[tuple[int, int, float], list[float]] = {}
    for rows, context, ms, reqs in table.samples:
        groups.setdefault((rows, reqs, context), []).append(ms)
    for (rows, reqs, context), times in sorted(groups.items()):
        middle = sorted(times)[len(times) // 2]
        curves = "         -         -"
        if profile.calibrated is not None:
            fitted = float(profile.calibrated.predict_ms(rows, context, reqs))
            bare = float(profile.calibrated.roofline.predict_ms(rows, context, reqs))
            curves = f"{fitted:10.3f}{bare:10.3f}"
        lines.append(f"{rows:6d}{reqs:6d}{context:10.0f}{middle:13.3f}  {curves}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
