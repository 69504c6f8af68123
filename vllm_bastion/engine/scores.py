# SPDX-License-Identifier: Apache-2.0
"""Path scores on the host, for a step that is sized before its own scores arrive."""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_bastion.platform import current_host
from vllm_bastion.policy.trees import Trees

# Weight of a step in the mean scores, which stand for a tree whose own are not known yet.
_WEIGHT = 0.1


class EarlierScores:
    """Path scores of the trees before the current ones, on the host.

    A copy is read one step after it was queued, so the host waits only if the device is more than a
    step behind. Only stream order protects a copy: the scores must be written on the stream on
    which it is queued.
    """

    def __init__(self, trees: Trees) -> None:
        # Gathered where trees are grown, in a CUDA graph if there is one.
        self._gathered = trees.row_scores = torch.zeros_like(trees.log_rho)
        on_device = current_host().runs_ahead
        shape = trees.log_rho.shape
        self._host = [torch.zeros(shape, pin_memory=on_device) for _ in range(2)]
        # Non-blocking events spin: the device may be idle while the host waits.
        self._arrived = [torch.cuda.Event() if on_device else None for _ in range(2)]
        self._slots = [np.zeros(0, dtype=np.int64) for _ in range(2)]
        self._turn = 0
        # [S, N] by slot, NaN where no tree is known, and the mean that stands for it.
        self._scores = np.full(shape, np.nan)
        self._mean = np.ones(shape[1])

    def forget(self, slot: int) -> None:
        """A new request takes the slot."""
        self._scores[slot] = np.nan
        for slots in self._slots:
            slots[slots == slot] = -1

    def copy(self, slots: np.ndarray) -> None:
        """Start the copy of the scores of the requests in `slots`, [R], whose trees just grew."""
        self._read()
        turn, self._turn = self._turn, self._turn ^ 1
        self._slots[turn] = slots.copy()
        if slots.size:
            rows = slice(slots.size)
            self._host[turn][rows].copy_(self._gathered[rows], non_blocking=True)
            if (event := self._arrived[turn]) is not None:
                event.record()

    def of(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[R, width] float64 scores of the requests in `slots`."""
        self._read()
        scores = self._scores[slots, :width]
        return np.where(np.isnan(scores), self._mean[:width], scores)

    def _read(self) -> None:
        """Read the older of the two copies; the next one overwrites it."""
        slots, event = self._slots[self._turn], self._arrived[self._turn]
        self._slots[self._turn] = slots[:0]
        if not slots.size or not (slots >= 0).any():
            return
        if event is not None and not event.query():
            with gpu_sync_allowed():
                event.synchronize()
        log_rho = self._host[self._turn].numpy()[: len(slots)][slots >= 0]
        scores = np.exp(log_rho.astype(np.float64))
        self._scores[slots[slots >= 0]] = scores
        self._mean += _WEIGHT * (scores.sum(axis=0) / len(scores) - self._mean)
