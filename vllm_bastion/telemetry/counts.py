# SPDX-License-Identifier: Apache-2.0
"""What is counted of a step, and the counters that it is added to.

Kinds of steps:

    tree     verifies nodes of draft trees
    n-gram   verifies n-gram drafts alone
    chain    verifies drafts of width 1, whose rows are causal
    plain    gives requests tokens, and verifies nothing
    prompt   gives no request a token

A step's reason is why it has drafts, or why it has none; see `docs/metrics.md` for the list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Where a node comes from: the drafter alone, an n-gram draft alone, or both.
SOURCES = ("drafter", "lookup", "both")
# Of steps that decode.
DECODING = ("tree", "chain", "n-gram", "plain")

# Name -> what it counts, and its labels.
COUNTERS: dict[str, tuple[str, ...]] = {
    "steps": ("Steps by kind and reason.", "kind", "reason"),
    "nodes_by_source": ("Nodes verified, by who proposed them.", "source"),
    "accepted_by_source": ("Draft tokens accepted, by who proposed them.", "source"),
    "expected_tokens": ("Draft tokens expected to be accepted, the sum of path scores.",),
    "request_steps": ("Times that a step gave a request tokens.",),
    "accepted_tokens": ("Draft tokens accepted and returned.",),
    "timed_steps": ("Steps between whose outputs the gate measured the time.", "kind"),
    # In milliseconds, not in seconds: `llm.get_metrics()` truncates counters to integers.
    "step_ms": ("Milliseconds of the timed steps.", "kind"),
}
# (counter, *labels) -> amount; also of "trees" and "nodes", which vLLM's own metrics have, for the
# log. On the way to a front end the parts of a key are joined.
Counts = Counter[tuple[str, ...]]
_JOINT = "|"


@dataclass(slots=True)
class StepRecord:
    """What the engine core knows about one step."""

    kind: str = "prompt"
    reason: str = ""
    # Requests that the step gave tokens to.
    requests: int = 0
    # Of these, those that verified nodes; their nodes; and the draft tokens accepted of these that
    # their clients get: a stop may cut off the last ones.
    trees: int = 0
    nodes: int = 0
    accepted: int = 0
    # Draft tokens expected to be accepted, the sum of path scores. 0 with a fixed budget.
    expected: float = 0.0
    # Milliseconds since the step before; 0 where the gate does not use the time.
    ms: float = 0.0
    # Nodes verified, then draft tokens accepted, of each of SOURCES; empty without lookup.
    sources: Sequence[int] = ()


def add(counts: Counts, step: StepRecord) -> None:
    """Count one step."""
    counts["steps", step.kind, step.reason] += 1
    counts["request_steps",] += step.requests
    counts["trees",] += step.trees
    counts["nodes",] += step.nodes
    counts["accepted_tokens",] += step.accepted
    # A counter raises on a negative amount and keeps NaN for ever, and a clock may be set back.
    if 0 < step.expected < math.inf:
        counts["expected_tokens",] += step.expected  # type: ignore[assignment]
    if 0 < step.ms < math.inf:
        counts["timed_steps", step.kind] += 1
        counts["step_ms", step.kind] += step.ms  # type: ignore[assignment]
    for i, amount in enumerate(step.sources):
        name = "nodes_by_source" if i < len(SOURCES) else "accepted_by_source"
        counts[name, SOURCES[i % len(SOURCES)]] += amount


def to_plain(counts: Counts) -> dict[str, float]:
    """With strings as keys, for msgpack; see `from_plain`."""
    return {_JOINT.join(key): amount for key, amount in counts.items()}


def from_plain(plain: dict[str, float]) -> Counts:
    """The inverse of `to_plain`."""
    return Counter({tuple(key.split(_JOINT)): amount for key, amount in plain.items()})
