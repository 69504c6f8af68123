# SPDX-License-Identifier: Apache-2.0
"""Records that this plugin attaches to objects of vLLM that have no field for them.

An attribute may get lost where such an object is copied or sent to another process, so the reader
of a record that must be there uses `of`, which raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from vllm_bastion.scheduler.gate import Arm

_ANYTHING = -1  # a word of a bitmask row that allows every token


class AttachedRecord:
    """A record that is stored on an object of vLLM as its attribute `bastion`."""

    def attach(self, owner: Any) -> None:
        """Store this record on `owner`, in place of an earlier one."""
        owner.bastion = self

    @classmethod
    def find(cls, owner: Any) -> Self | None:
        """The record on `owner`, or None."""
        found = getattr(owner, "bastion", None)
        return found if isinstance(found, cls) else None

    @classmethod
    def of(cls, owner: Any) -> Self:
        """The record on `owner`.

        Raises:
            RuntimeError: there is none.
        """
        found = getattr(owner, "bastion", None)
        if not isinstance(found, cls):
            raise RuntimeError(
                f"vLLM's {type(owner).__name__} lost the {cls.__name__} that vllm-bastion attached "
                "to it: this vLLM or one of its plugins copies or sends it without unknown "
                "attributes"
            )
        return found


@dataclass
class StepPlan(AttachedRecord):
    """On a SchedulerOutput, from the scheduler to the workers."""

    arm: Arm = Arm.TREE
    """What the step ends with."""
    verified: Arm = Arm.TREE
    """The arm of the drafts that the step verifies: what the step before ended with."""
    reason: str = ""
    """Why `verified` was chosen: a label of metrics."""
    step_ms: float | None = None
    """The gate's time of a step that verifies that arm at this batch size, for the paper's
    estimators."""
    line: tuple[float, float] = (1.0, 0.0)
    """Of that arm at this batch size: ms of a step = line[0] * profile's + line[1]."""
    ngram_tokens: float | None = None
    """Tokens per request from which n-gram drafts alone are as fast as trees."""
    prompts_wait: bool = False
    """Whether nothing is drafted because prompts fill the next step."""
    ngram_groups: dict[str, int] = field(default_factory=dict)
    """Request id -> group, for new requests; those of one group see each other's replies."""


@dataclass
class StepReport(AttachedRecord):
    """On a ModelRunnerOutput, from a worker to the scheduler."""

    num_verified: dict[str, int]
    """Request id -> nodes verified in the step, bonus token not counted."""
    verified: Arm = Arm.TREE
    """The arm of these nodes: a CPU may take a simpler one than was planned."""
    expected: float = 0.0
    """Accepted draft tokens expected of these nodes, the sum of their path scores."""
    sources: Sequence[int] = ()
    """Nodes verified, then draft tokens accepted, by source; see `telemetry.counts.SOURCES`."""
    predicted_ms: float = 0.0
    """Of this step by the profile; 0 if its nodes were not chosen by it, or with prompts."""


@dataclass
class GrammarTree(AttachedRecord):
    """On a Request: its latest drafts, n nodes by column, and what its grammar says of them."""

    tokens: list[int]
    rows: np.ndarray
    """[1 + n, words] int32, bitmask of the tokens that may follow the root and every node."""
    num_tokens: int
    """Tokens of the request when its grammar checked the tree."""
    refused: int
    """Nodes that are never followed."""

    def rows_of(self, scheduled: Sequence[int], num_tokens: int) -> np.ndarray | None:
        """[1 + n, words] for n scheduled drafts, -1 past the known ones; None for other text."""
        known = [token for token in scheduled if token >= 0]
        if num_tokens != self.num_tokens or known != self.tokens[: len(known)]:
            return None
        rows = np.full((1 + len(scheduled), self.rows.shape[1]), _ANYTHING, dtype=np.int32)
        rows[: 1 + len(known)] = self.rows[: 1 + len(known)]
        return rows
