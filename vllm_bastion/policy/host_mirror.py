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


def to_device(
    data: np.ndarray,
    *,
    out: torch.Tensor | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy an array to a device without waiting: into `out`, or into a new tensor on `device`.

    The copy reads pinned memory of its own, so `data` may change as soon as this returns.
    """
    target = out.device if out is not None else device
    assert target is not None
    source = torch.from_numpy(data)
    kind = out.dtype if out is not None else (dtype or source.dtype)
    if target.type != "cpu":
        source = torch.empty(source.shape, dtype=kind, pin_memory=True).copy_(source)
    if out is not None:
        return out.copy_(source, non_blocking=True)
    # A CPU tensor must not share the array's memory: the caller may reuse it.
    return source.to(device=target, dtype=kind, non_blocking=True, copy=target.type == "cpu")
