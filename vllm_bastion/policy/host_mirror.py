# SPDX-License-Identifier: Apache-2.0
"""Device results on the host: one asynchronous copy per step, and a wait only to read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Published:
    """The results of a step on the host. Arrays are views, see `HostMirror.read`."""

    # [R] request slots of the batch that trees were grown for; None if the step did not draft.
    grown_for: np.ndarray | None
    # [S] N* of those trees, and the accepted tokens expected of that many nodes.
    num_verify: np.ndarray
    promised: np.ndarray
    # [S] tokens that the step emitted.
    emitted: np.ndarray
    # [S] tokens of the copies in those trees that are expected to be accepted; 0 without lookup.
    copied: np.ndarray
    # Whether those trees are copies alone.
    only_copies: bool


class HostMirror:
    """A device tensor's values at the end of the last two steps that published it.

    Nothing but stream order protects a copy: it must be queued on the one stream on which the
    tensor is written and later overwritten.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self._on_device = source.device.type != "cpu"
        self._host = [
            torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._on_device)
            for _ in range(2)
        ]
        self._arrays = [buffer.numpy() for buffer in self._host]
        self._steps: list[int | None] = [None, None]
        if self._on_device:
            # Not blocking events: the device may be idle while the host waits, so the wait spins
            # instead of sleeping.
            self._copied = [torch.cuda.Event() for _ in range(2)]

    def start_copy(self, step: int) -> None:
        """Publish the tensor's value as that of `step`, which overwrites that of `step` - 2."""
        buffer = step % 2
        self._steps[buffer] = step
        self._host[buffer].copy_(self.source, non_blocking=self._on_device)
        if self._on_device:
            self._copied[buffer].record()

    def holds(self, step: int) -> bool:
        """Whether the tensor was published in `step`, and not overwritten since."""
        return self._steps[step % 2] == step

    def read(self, step: int) -> np.ndarray | None:
        """The value published in `step`, or None; waits if its copy has not arrived.

        A view, valid until the step after the next one publishes.
        """
        if not self.holds(step):
            return None
        buffer = step % 2
        if self._on_device and not self._copied[buffer].query():
            self._copied[buffer].synchronize()
        return self._arrays[buffer]


def to_device(
    data: np.ndarray,
    *,
    out: torch.Tensor | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy an array to a device without waiting.

    The copy reads its own pinned memory, so `data` may change as soon as this returns.

    Args:
        data: any shape.
        out: tensor to copy into; None: a new one.
        device: of the new tensor.
        dtype: of the new tensor; default: that of `data`.
    """
    target = out.device if out is not None else device
    assert target is not None
    source = torch.from_numpy(data)
    kind = out.dtype if out is not None else (dtype or source.dtype)
    if target.type != "cpu":
        source = torch.empty(source.shape, dtype=kind, pin_memory=True).copy_(source)
    if out is not None:
        return out.copy_(source, non_blocking=True)
    # On a CPU `source` shares the array's memory, which the caller may overwrite.
    return source.to(device=target, dtype=kind, non_blocking=True, copy=target.type == "cpu")
