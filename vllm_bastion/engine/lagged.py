# SPDX-License-Identifier: Apache-2.0
"""Lagged timing: the last step's scores size a step, and its own scores choose the nodes.

The host must know a step's rows before it launches the step, and waiting for the scores would leave
the device idle between two steps. So the host sizes the step by N* of the previous step
(`policy.step_size`), and the device takes that many of the best nodes of the current trees. The
device runs a whole step while the host reads the older scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from bastion_kernels import take_best
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.verification import BastionVerificationManager
from vllm_bastion.policy.host_mirror import Published
from vllm_bastion.policy.shares import even_split


class LaggedVerificationManager(BastionVerificationManager):
    """``bastion_budget_timing: "lagged"``. Per-request counts are exact on the device only."""

    lag = 1

    def __init__(self, runtime: Runtime, *args: Any) -> None:
        super().__init__(runtime, *args)
        num_slots = len(self.trees.num_verify)
        # By request slot: most nodes, and rows that are not nodes.
        self._layout_np = np.zeros((2, num_slots), dtype=np.int32)
        self._layout = torch.zeros(2, num_slots, dtype=torch.int32, device=self.trees.device)
        self._layout_is_copied = True
        self._scratch = torch.zeros(num_slots + 1, dtype=torch.int32, device=self.trees.device)
        self._slots = np.zeros(0, dtype=np.int64)

    def _choose(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """An even split of the step's nodes, [R] int32. The device keeps only its sum."""
        self._observe_past_step()
        limits = self._max_nodes(drafts)
        layout = np.stack((limits, self._plain_rows))
        if (self._layout_np[:, slots] != layout).any():
            self._layout_np[:, slots], self._layout_is_copied = layout, False
        self._slots = slots
        controller = self.runtime.controller
        total = min(int(limits.sum()), self._max_step_nodes(len(slots)))
        if controller is not None:
            total = controller.size.choose(
                int((limits > 0).sum()),
                len(slots),
                int(self._plain_rows.sum()),
                total,
                controller.copy_cost_ms if self._only_copies else controller.costs.curve,
                self.runtime.graph_sizes,
            )
        return even_split(total, limits)

    def _observe(self, published: Published) -> None:
        super()._observe(published)
        controller = self.runtime.controller
        if published.grown_for is not None and controller is not None:
            slots = published.grown_for
            slots = slots[self.trees.node_limits_host[slots] > 0]
            if len(slots):
                nodes, tokens = published.num_verify[slots].sum(), published.promised[slots].sum()
                controller.size.observe(int(nodes), len(slots), float(tokens))

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        total, limits = self._num_nodes, self._layout_np[0, self._slots]
        if total in (0, limits.sum()) or np.count_nonzero(limits) == 1:
            # Nothing to choose from, or one tree gets all, and the host's counts are exact.
            return super().reallocate_drafts(req_ids, idx_mapping)
        if not self._layout_is_copied:
            async_tensor_h2d(self._layout_np, out=self._layout)
            self._layout_is_copied = True
        # Allocated in each step, as vLLM's is: the copy to the host may outlive the step.
        cu_num_logits = self._scratch.new_empty(len(req_ids) + 1)
        self._share_out(idx_mapping, total, cu_num_logits)
        # Copied on the step's own stream, so that it arrives before the step's output.
        self._num_logits_np = async_copy_to_np(cu_num_logits)
        return self._reallocated(cu_num_logits, total)

    def _share_out(self, slots: torch.Tensor, total: int, cu_num_logits: torch.Tensor) -> None:
        limits, rest = self._layout
        take_best(
            self.trees.log_rho,
            slots,
            limits,
            rest,
            total,
            cu_num_logits,
            self.query_start_loc,
            self._scratch,
        )

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32. The device may give a row any number of nodes up to its placeholders."""
        return self._drafts

    def warm_up(self) -> None:
        """Compile the op that chooses the nodes."""
        self._share_out(self.trees.step_slots[:1], 0, self._scratch.new_empty(2))
