# SPDX-License-Identifier: Apache-2.0
"""The same without a wait: a step's size from the last step's scores, its members from its own.

The host must know a step's rows before it launches the step. Waiting for the scores leaves the
device idle between two steps; here the host takes the number of nodes per request that the scores
of the step before asked for, which have long arrived, and the device fills that number with the
best nodes there are now.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bastion_kernels import take_best
from vllm_bastion.step.host import copy_to_device
from vllm_bastion.step.runtime import Runtime
from vllm_bastion.step.shares import even_split
from vllm_bastion.step.verification import BastionVerificationManager


class LaggedVerificationManager(BastionVerificationManager):
    """``bastion_budget_timing: "lagged"``. Per-request counts are exact on the device only."""

    def __init__(self, runtime: Runtime, *args: Any) -> None:
        super().__init__(runtime, *args)
        self._limits, self._counts, self._rows = (
            torch.zeros_like(self.trees.num_verify) for _ in range(3)
        )

    def _choose(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """An even split of the step's nodes, [R] int32; only its sum is binding."""
        trees = self.trees
        # Columns of each tree, known without the device. A tree can have fewer nodes than that,
        # where a candidate's probability is 0: rows past its end are verified and lead nowhere.
        size = np.where(trees.spine_only_np[slots], trees.chain_size, trees.tree_size)
        limits = np.minimum(drafts, size).astype(np.int32)
        wanted, reqs = trees.previous_num_verify()
        per_request = wanted / reqs if reqs else float(trees.tree_size)
        total = min(
            round(per_request * int((limits > 0).sum())),
            int(limits.sum()),
            self._room(len(slots)),
        )
        self._limits_np = limits
        return even_split(total, limits)

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        trees, count = self.trees, len(req_ids)
        total = int(self._kept.sum())
        limits = copy_to_device(self._limits_np, self._rows[:count])
        self._limits[idx_mapping] = limits
        take_best(trees.log_rho, idx_mapping, self._limits, total, self._counts)
        counts = self._counts[idx_mapping]
        cu_num_logits = self._cu_num_logits[: count + 1]
        torch.cumsum(counts + self.num_bonus_tokens, 0, out=cu_num_logits[1:])
        rest = copy_to_device(self._rest, self._rows[:count])
        torch.cumsum(counts + rest, 0, out=self.query_start_loc[1 : count + 1])
        return self._reallocated(cu_num_logits, total)

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32; the device may give a row any number of nodes up to its placeholders."""
        return self._drafts

    def warm_up(self) -> None:
        """Compile what the first step would wait for."""
        trees = self.trees
        take_best(trees.log_rho, trees.step_slots[:1], self._limits, 0, self._counts)
