# SPDX-License-Identifier: Apache-2.0
"""The log line that accompanies vLLM's periodic one."""

from __future__ import annotations

from collections import Counter

from vllm_bastion.telemetry.counts import DECODING, Counts


def interval_line(sums: Counts, gain: float | None, name: str = "Bastion") -> str | None:
    """What happened in one interval, or None if nothing was decoded in it.

    Args:
        sums: of the interval.
        gain: the gate's last gain over plain decoding, if it is known.
        name: what the line begins with.
    """
    steps: dict[str, Counter[str]] = {kind: Counter() for kind in DECODING}
    for (counter, *labels), amount in sums.items():
        if counter == "steps" and labels[0] in steps:
            steps[labels[0]][labels[1]] += amount
    decoding = sum(counts.total() for counts in steps.values())
    if not decoding:
        return None
    trees, nodes, accepted = sums["trees",], sums["nodes",], sums["accepted_tokens",]
    parts = []
    if trees:
        parts.append(
            f"{nodes / trees:.1f} nodes and {accepted / trees:.2f} accepted tokens per tree"
        )
    if ngram_nodes := sums["nodes_by_source", "lookup"] + sums["nodes_by_source", "both"]:
        ngram_accepted = sums["accepted_by_source", "lookup"] + sums["accepted_by_source", "both"]
        parts.append(
            f"n-gram drafts {100 * ngram_nodes / nodes:.0f}% of nodes and "
            f"{100 * ngram_accepted / max(accepted, 1):.0f}% of accepted tokens"
        )
    for kind, reasons in steps.items():
        if count := reasons.total():
            parts.append(f"{kind} steps {100 * count / decoding:.0f}% ({_shares(reasons)})")
    for kind in DECODING:
        if timed := sums["timed_steps", kind]:
            parts.append(f"{kind} step {sums['step_ms', kind] / timed:.2f} ms")
    if gain is not None:
        parts.append(f"measured {gain:.2f}x of plain decoding")
    return f"{name}: " + "; ".join(parts)


def _shares(reasons: Counter[str]) -> str:
    """The reasons of a kind of step, the most frequent first, with their shares."""
    if len(reasons) == 1:
        return next(iter(reasons))
    whole = reasons.total()
    return ", ".join(f"{name} {100 * n / whole:.0f}%" for name, n in reasons.most_common())
