# SPDX-License-Identifier: Apache-2.0
"""A stored latency profile as text: what was measured, and the curves that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_bastion.cli.curves import Curve, curves
from vllm_bastion.envs import cache_dir
from vllm_bastion.policy.cost.doubts import doubts
from vllm_bastion.policy.cost.store import Profile

_CHEAP = 1.1  # nodes are cheap while a step takes less than this many times one without nodes


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


def _by_requests(samples: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{ms:.3f} ms at R={reqs}" for reqs, ms in samples)


def conclusion(profile: Profile, context: float | None = None) -> str:
    """What a profile means, in a few sentences, with what makes it doubtful.

    context: cached tokens of each request; None: the fewest that were measured.
    """
    drawn = curves(profile.table, context)
    target, drafter = (name or "unknown" for name in profile.names)
    lines = [
        f"{_cheap_nodes(drawn.curves[0])} (one request, {drawn.context:.0f} cached tokens).",
        f"Target {target}, drafter {drafter}.",
    ]
    found = profile.doubts()
    if found:
        more = f" ({len(found) - 1} more, see --table)" if len(found) > 1 else ""
        lines.append(f"Doubtful: {found[0]}{more}. Measure again on an idle machine.")
    return "\n".join(lines)


def _cheap_nodes(curve: Curve) -> str:
    """How many nodes are cheap in a step of one request, and what such a tree must gain."""
    *_, (nodes, needed) = (
        (n, accepted)
        for n, ms, accepted in zip(curve.nodes, curve.cost_ms, curve.break_even, strict=True)
        if ms <= _CHEAP * curve.cost_ms[0]
    )
    if nodes == 0:
        return "Nodes are expensive here: the first ones make a step more than 10% longer"
    words = "nodes cost" if nodes > 1 else "node costs"
    which = "At least" if nodes == curve.nodes[-1] else "Up to about"
    return (
        f"{which} {nodes} {words} less than 10% here; such a tree pays if about "
        f"{max(needed, 0.0):.1f} of its tokens are accepted"
    )


def profile_text(profile: Profile) -> str:
    """A profile's set-up as text, and what follows from all its measurements."""
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
        f"draft      {_by_requests(table.drafter_samples)}",
        f"a position {_by_requests(table.position_samples) or 'not spared'}",
        f"overhead   {table.aux_ms:.3f} ms (plain step {table.plain_aux_ms:.3f} ms)",
    ]
    if profile.rmse_before is not None and profile.rmse_after is not None:
        reduction = 100 * (1 - profile.rmse_after / profile.rmse_before)
        lines.append(
            f"roofline   RMSE on held-out points {profile.rmse_before:.3f} -> "
            f"{profile.rmse_after:.3f} ms ({reduction:.1f} % less)"
        )
    return "\n".join(lines)


def table_text(profile: Profile) -> str:
    """What was measured: a row for each size, batch and context."""
    table = profile.table
    doubtful = {doubt.point for doubt in doubts(table.samples)}
    lines = ["  rows  reqs   context  measured ms  calibrated  roofline"]
    groups: dict[tuple[int, int, float], list[float]] = {}
    for rows, context, ms, reqs in table.samples:
        groups.setdefault((rows, reqs, context), []).append(ms)
    for (rows, reqs, context), times in sorted(groups.items()):
        middle = sorted(times)[len(times) // 2]
        fits = "         -         -"
        if profile.calibrated is not None:
            fitted = float(profile.calibrated.predict_ms(rows, context, reqs))
            bare = float(profile.calibrated.roofline.predict_ms(rows, context, reqs))
            fits = f"{fitted:10.3f}{bare:10.3f}"
        mark = "  doubtful" if (rows, context, reqs) in doubtful else ""
        lines.append(f"{rows:6d}{reqs:6d}{context:10.0f}{middle:13.3f}  {fits}{mark}")
    lines += [f"doubtful: {text}" for text in profile.doubts()]
    return "\n".join(lines)
