# SPDX-License-Identifier: Apache-2.0
"""The record of a step: what it verifies, and what it ends with.

`engine.planning` makes one for each batch, before the target's forward pass. The target's layers,
the drafter and the budget read it. It is immutable; where the host sees the sampled tokens, the
drafter replaces it by one with a simpler arm if replies end or n-gram drafts are good enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_bastion.policy.trees import Trees
from vllm_bastion.scheduler.gate import Arm

_NONE = np.zeros(0, dtype=np.int32)


class Step(NamedTuple):
    """One step with R requests."""

    batch: InputBatch | None = None
    # [R] most nodes of each request on the device, and its rows that are not nodes: its bonus
    # token, or the tokens of its prompt.
    nodes: np.ndarray = _NONE
    base_rows: np.ndarray = _NONE
    # Whether the attention reads the mask.
    masked: bool = False
    # Whether drafts are verified.
    verifies: bool = False
    # What it ends with.
    arm: Arm = Arm.TREE

    @property
    def drafts(self) -> bool:
        """Whether it ends with a pass of the drafter."""
        return self.arm == Arm.TREE

    @property
    def grows(self) -> bool:
        """Whether it ends with trees."""
        return self.arm != Arm.PLAIN


@dataclass(kw_only=True)
class TreeMetadata:
    """Mixed into vLLM's metadata class of a backend that reads tree masks."""

    trees: Trees | None = None
    record: Step | None = None
    """Set by `BastionModelState.prepare_attn`; None for a batch that it did not prepare."""
