# SPDX-License-Identifier: Apache-2.0
"""The log line that accompanies vLLM's periodic one."""

from __future__ import annotations

from vllm_bastion.telemetry.record import Totals

# Of steps that decode.
_KINDS = ("tree", "chain", "n-gram", "plain")


def interval_line(totals: Totals, name: str = "Bastion") -> str | None:
    """What happened in one interval, or None if nothing was decoded in it.

    name: what the line begins with.
    """
    decoding = totals.steps_of(*_KINDS)
    if not decoding:
        return None
    parts = []
    if totals.trees:
        parts.append(
            f"{totals.nodes / totals.trees:.1f} nodes and "
            f"{totals.accepted / totals.trees:.2f} accepted tokens per tree"
        )
    if copied := sum(totals.sources[1:3]):
        accepted = sum(totals.sources[4:6])
        parts.append(
            f"n-gram drafts {100 * copied / totals.nodes:.0f}% of nodes and "
            f"{100 * accepted / max(totals.accepted, 1):.0f}% of accepted tokens"
        )
    for kind in _KINDS:
        if count := totals.steps_of(kind):
            parts.append(f"{kind} steps {100 * count / decoding:.0f}% ({_reasons(totals, kind)})")
    parts += [f"{kind} step {ms / n:.2f} ms" for kind, (n, ms) in totals.times.items()]
    if totals.gain is not None:
        parts.append(f"measured {totals.gain:.2f}x of plain decoding")
    return f"{name}: " + "; ".join(parts)


def _reasons(totals: Totals, kind: str) -> str:
    """The reasons of a kind of step, the most frequent first, with their shares."""
    counts = {reason: n for (name, reason), n in totals.steps.items() if name == kind}
    if len(counts) == 1:
        return next(iter(counts))
    whole = sum(counts.values())
    most = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {100 * count / whole:.0f}%" for reason, count in most)
