# SPDX-License-Identifier: Apache-2.0
"""The line that a worker logs once its step costs are known: the settings that were chosen.

Imports no vLLM, so that the line can be tested alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from vllm_bastion.host import HostChoices
from vllm_bastion.policy.cost.store import unix_time


@dataclass(frozen=True)
class EngineSummary:
    """What was chosen for one engine.

    Attributes:
        drafter: architecture of the drafter's checkpoint.
        gamma: drafted positions.
        candidates: K, candidate tokens of each position.
        nodes: N, most nodes of a tree.
        budget: "adaptive", or the number of nodes that every step verifies.
        lagged: whether the budget comes from the previous step's scores.
        costs: where the step costs come from; see `loaded`, `measured` and the constants below.
        choices: the host's.
    """

    drafter: str
    gamma: int
    candidates: int
    nodes: int
    budget: str | int
    lagged: bool
    costs: str
    choices: HostChoices

    def sentence(self) -> str:
        """The line to log."""
        parts = [
            f"{self.drafter} with gamma {self.gamma}, K {self.candidates}, N {self.nodes}",
            f"budget {self.budget}",
            f"step costs {self.costs}",
        ]
        if self.budget == "adaptive":
            parts[1] += f" ({'lagged' if self.lagged else 'exact'})"
        return "Bastion: " + "; ".join([*parts, *self.choices.texts()])


FIXED_BUDGET = "not needed for a fixed budget"
ROOFLINE = "from the bare roofline, not measured"
FLAT = "unknown: neither a profile nor a roofline, so every step counts as equally long"


def measured(seconds: float) -> str:
    """`costs` of an engine that was just measured."""
    return f"measured now in {seconds:.1f} s"


def loaded(created: str, now: datetime | None = None) -> str:
    """`costs` of an engine whose profile was measured earlier.

    created: `Profile.created`, in ISO format. now: for tests.
    """
    then = unix_time(created)
    if then is None:
        return f"loaded, measured {created or 'at an unknown time'}"
    seconds = max(0.0, (now or datetime.now(UTC)).timestamp() - then)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"loaded, measured {count} {unit}{'s' if count > 1 else ''} ago"
    return "loaded, measured less than a minute ago"
