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

from vllm_bastion.step_times import StepTimes
from vllm_bastion.telemetry.collector import Collector
from vllm_bastion.telemetry.record import StepRecord

_ATTRIBUTE = "bastion"
_ANYTHING = -1  # a word of a bitmask row that allows every token


class MissingCarrierError(RuntimeError):
    """An object of vLLM arrived without the record that was attached to it."""


class Carrier:
    """A record that is stored on an object of vLLM as its attribute `bastion`."""

    def attach(self, owner: Any) -> None:
        """Store this record on `owner`, in place of an earlier one."""
        setattr(owner, _ATTRIBUTE, self)

    @classmethod
    def find(cls, owner: Any) -> Self | None:
        """The record on `owner`, or None."""
        found = getattr(owner, _ATTRIBUTE, None)
        return found if isinstance(found, cls) else None

    @classmethod
    def of(cls, owner: Any) -> Self:
        """The record on `owner`.

        Raises:
            MissingCarrierError: there is none.
        """
        found = cls.find(owner)
        if found is None:
            raise MissingCarrierError(
                f"vLLM's {type(owner).__name__} lost the {cls.__name__} that vllm-bastion attached "
                "to it: this vLLM or one of its plugins copies or sends it without unknown "
                "attributes"
            )
        return found

    @classmethod
    def ensure(cls, owner: Any) -> Self:
        """The record on `owner`, which gets a default one first if it has none."""
        found = cls.find(owner)
        if found is None:
            found = cls()
            found.attach(owner)
        return found


@dataclass
class StepPlan(Carrier):
    """On a SchedulerOutput, from the scheduler to the workers."""

    grammar_columns: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Request id -> columns of its tree to verify, ascending, and their parents' new node numbers.
    Only requests whose tree a grammar has pruned."""
    backlog: bool = False
    """Whether prompts can fill the step after this one, so that it has no room for drafts."""
    times: Sequence[StepTimes] = ()
    """Times of earlier steps, for all ranks to learn from; see `StepReport.times`."""


@dataclass
class StepReport(Carrier):
    """On a ModelRunnerOutput, from a worker to the scheduler."""

    num_verified: dict[str, int]
    """Request id -> nodes verified in the step, root not counted."""
    drafting: bool = True
    """Whether the step that is scheduled next can use placeholders."""
    step: StepRecord | None = None
    """What the worker recorded about the step."""
    times: Sequence[StepTimes] = ()
    """Times of completed steps, where several ranks must learn from the same times."""


@dataclass
class SchedulerState(Carrier):
    """On a Scheduler."""

    drafting: bool = True
    """As the last StepReport said."""
    times: list[StepTimes] = field(default_factory=list)
    """From the last StepReports, on their way to all ranks."""
    blocked_at: int | None = None
    """Number of running requests at which the waiting ones did not fit into the KV cache."""
    blocked_for: int = 0
    """Steps for which this is believed: something else may have held them up."""
    collector: Collector | None = None
    """Adds up the records of steps; None before the first."""


@dataclass
class RequestState(Carrier):
    """On a Request, in the engine core."""

    wanted_placeholders: int | None = None
    """Placeholders that the request can use; None before its first tree was verified."""
    grammar_tree: GrammarTree | None = None
    """Its latest drafts, if it has a grammar."""


@dataclass
class GrammarTree:
    """A request's drafts after its grammar has pruned them: n nodes in the order of columns."""

    tokens: list[int]
    parents: list[int]
    columns: list[int]
    """The nodes' columns in the tree before pruning."""
    rows: np.ndarray
    """[1 + n, words] int32, bitmask of the tokens that may follow the root and every node."""
    num_tokens: int
    """Tokens of the request when its grammar was walked."""
    refused: int
    """Nodes removed, or never followed."""

    @property
    def pruned(self) -> bool:
        """Whether the nodes differ from the first n of the tree."""
        return self.columns != list(range(len(self.columns)))

    def rows_of(self, scheduled: Sequence[int], num_tokens: int) -> np.ndarray | None:
        """[1 + n, words] for n scheduled drafts, -1 past the known ones; None if tokens differ."""
        known = [token for token in scheduled if token >= 0]
        if num_tokens != self.num_tokens or known != self.tokens[: len(known)]:
            return None
        rows = np.full((1 + len(scheduled), self.rows.shape[1]), _ANYTHING, dtype=np.int32)
        rows[: 1 + len(known)] = self.rows[: 1 + len(known)]
        return rows
