# SPDX-License-Identifier: Apache-2.0
"""A stored latency profile as text: what was measured, and the curves that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_bastion.envs import cache_dir
from vllm_bastion.policy.cost.store import Profile


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
