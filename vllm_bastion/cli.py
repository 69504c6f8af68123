# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion calibrate | show | explain`: measure an engine, look at what was measured, and at
what one step's decision was made of.

`show` and `explain` need neither vLLM nor a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_bastion.envs import cache_dir
from vllm_bastion.profile_store import Profile, read_profile


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "calibrate":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "calibrate":
            return _calibrate(arguments, rest)
        if arguments.command == "show":
            return _show(arguments)
        return _explain(arguments)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"vllm-bastion {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-bastion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    calibrate = commands.add_parser(
        "calibrate",
        help="start the engine, measure its steps and store the profile",
        description="Further options are vLLM's own (EngineArgs), e.g. --tensor-parallel-size 2.",
    )
    calibrate.add_argument("target", help="target model, a name or a folder")
    calibrate.add_argument("drafter", help="its DFlash drafter")
    calibrate.add_argument("--out", type=Path, help="profile file; default: the cache")
    show = commands.add_parser("show", help="print a profile and draw it")
    show.add_argument("profile", type=Path, nargs="?", help="default: the newest in the cache")
    show.add_argument("--png", type=Path, help="also draw it into this file")
    explain = commands.add_parser("explain", help="one recorded step: scores, costs, decision")
    explain.add_argument("recording", type=Path)
    explain.add_argument("--step", type=int, default=0, help="index of the step (default 0)")
    explain.add_argument("--profile", type=Path, help="default: the newest in the cache")
    explain.add_argument("--nodes", type=int, default=64, help="N_max (default 64)")
    explain.add_argument("--tokenizer", help="model whose tokenizer turns ids into text")
    explain.add_argument("--out", type=Path, default=Path("."), help="folder for PNG and page")
    return parser


def _calibrate(arguments: argparse.Namespace, engine_args: list[str]) -> int:
    from vllm_bastion.runner.calibrate import main as calibrate

    profile = calibrate(
        arguments.target, arguments.drafter, output=arguments.out, engine_args=engine_args
    )
    print(profile_text(profile))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    path = arguments.profile or newest_profile()
    profile = read_profile(path)
    print(path)
    print(profile_text(profile))
    if arguments.png:
        from vllm_bastion.plots import profile_figure

        profile_figure(profile, arguments.png)
        print(f"drawn: {arguments.png}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from vllm_bastion.explain import explain_step, explanation_html, explanation_text
    from vllm_bastion.latency import TableLatency
    from vllm_bastion.plots import step_figure
    from vllm_bastion.recording import load_recording

    profile = read_profile(arguments.profile or newest_profile())
    recording = load_recording(arguments.recording)
    step = explain_step(recording, arguments.step, TableLatency(profile.table), arguments.nodes)
    text = _token_text(arguments.tokenizer)
    print(explanation_text(step, text))
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = arguments.out / f"step-{arguments.step}.html"
    page.write_text(explanation_html(step, text), encoding="utf-8")
    figure = arguments.out / f"step-{arguments.step}.png"
    step_figure(step.order, step.cost_ms, 1, figure)
    print(f"\ndrawn: {page}, {figure}")
    return 0


def newest_profile() -> Path:
    """The profile in the cache that was written last.

    Raises:
        FileNotFoundError: there is none; the text says how to make one.
    """
    profiles = sorted(cache_dir().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not profiles:
        raise FileNotFoundError(
            f"no latency profile in {cache_dir()}; run 'vllm-bastion calibrate TARGET DRAFTER' or "
            "name a file"
        )
    return profiles[-1]


def profile_text(profile: Profile) -> str:
    """What was measured on what, as text: a row per measured size, a column group per context."""
    key, table = profile.key, profile.table
    lines = [
        f"device     {key.device}, tensor parallel {key.tp_size}, {key.dtype}",
        f"engine     vLLM {key.vllm_version}, attention {key.attention_backend}",
        f"models     target {key.target_hash}, drafter {key.drafter_hash}",
        f"measured   {profile.created}",
        f"graphs     {', '.join(map(str, table.captured_sizes)) or 'none'}",
        f"drafter    {', '.join(f'{ms:.3f} ms at R={r}' for r, ms in table.drafter_samples)}",
        f"overhead   {table.aux_ms:.3f} ms (plain {table.plain_aux_ms:.3f} ms)",
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


def _token_text(tokenizer: str | None) -> Callable[[int], str]:
    """Turn token ids into text, or into their numbers without a tokenizer."""
    if tokenizer is None:
        return str
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda token: str(loaded.decode([token]))


if __name__ == "__main__":
    raise SystemExit(main())
