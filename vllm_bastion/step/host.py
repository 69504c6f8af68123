# SPDX-License-Identifier: Apache-2.0
"""What the device decided, as the host learns it: one copy a step, and a wait only if asked."""

from __future__ import annotations

import numpy as np
import torch


class HostMirror:
    """A device tensor's values at the end of the last two steps that published it.

    The copies are queued behind the work that wrote the tensor and before what overwrites it, on
    the one stream that does both: nothing else orders them.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self._on_device = source.device.type != "cpu"
        self._host = [
            torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._on_device)
            for _ in range(2)
        ]
        self._steps: list[int | None] = [None, None]
        if self._on_device:
            # Waits spin: the host waits while the device is about to run dry, so it must not
            # have to be woken up first.
            self._copied = [torch.cuda.Event() for _ in range(2)]

    def start_copy(self, step: int) -> None:
        """Publish the tensor's value as that of `step`; the one of `step` - 2 is gone."""
        turn = step % 2
        self._steps[turn] = step
        self._host[turn].copy_(self.source, non_blocking=self._on_device)
        if self._on_device:
            self._copied[turn].record()

    def read(self, step: int) -> np.ndarray | None:
        """The value published in `step`, or None; waits if its copy has not arrived.

        A view: good until the step after the next publishes.
        """
        turn = step % 2
        if self._steps[turn] != step:
            return None
        if self._on_device and not self._copied[turn].query():
            self._copied[turn].synchronize()
        return self._host[turn].numpy()
