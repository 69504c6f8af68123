# SPDX-License-Identifier: Apache-2.0
"""The record of a step: what it verifies, and whether it ends with a draft.

`engine.planning` makes one for each batch, before the target's forward pass. The target's layers,
the drafter and the manager read it. It is immutable; where the host sees the sampled tokens, the
drafter replaces it by one with a shorter draft, or none, if replies end or copies pay more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Step:
    """One step with R requests."""

    batch: InputBatch | None = None
    # [R] most nodes of each request on the device, and its rows that are not nodes: its root, or
    # the tokens of its prompt.
    nodes: np.ndarray = field(default_factory=_none)
    base_rows: np.ndarray = field(default_factory=_none)
    # Mean cached tokens of its requests.
    context_len: float = 0.0
    # Whether kernels look for nodes, and whether the attention reads the mask.
    binds: bool = True
    masked: bool = False
    # Whether an acceptance walk follows.
    walks: bool = False
    # Whether it ends with trees of copies alone; with `drafts`, only if these turn out to pay more.
    looks_up: bool = False
    # Whether it ends with a draft, and how many positions at the end of each block are left out.
    drafts: bool = True
    spared: int = 0
    # Most tokens of a copy that its replies can still use; None where the host does not know.
    longest_copy: int | None = None
    # Whether the controller decided against a draft.
    refused: bool = False
    # Whether steps that are scheduled from now on get placeholders.
    announces: bool = True
    # Whether the draft that they get is a trial.
    is_trial: bool = False

    @property
    def grows(self) -> bool:
        """Whether it ends with trees."""
        return self.drafts or self.looks_up
