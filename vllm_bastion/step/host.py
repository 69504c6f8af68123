# SPDX-License-Identifier: Apache-2.0
"""Traffic between host and device that never blocks the step unless asked to."""

from __future__ import annotations

import numpy as np
import torch


def copy_to_device(data: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """Copy a host array into a device tensor of the same shape without waiting for it.

    The pinned staging tensor is a fresh one each time: a kept one could still be read by the
    copy of the step before (vLLM's ``async_tensor_h2d`` does the same).
    """
    source = torch.from_numpy(data)
    if out.device.type == "cpu":
        return out.copy_(source)
    return out.copy_(source.pin_memory(), non_blocking=True)


class HostMirror:
    """A device tensor's last published values, readable on the host.

    On CUDA ``start_copy`` enqueues a copy into pinned memory on a stream of its own, ordered after
    the work queued so far. Two host buffers take turns, so that the value published before the last
    one stays readable while the last one is still on its way.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self._on_device = source.device.type != "cpu"
        self._host = [
            torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._on_device)
            for _ in range(2)
        ]
        self._last = 0
        for buffer in self._host:
            buffer.copy_(source)
        if self._on_device:
            self._stream = torch.cuda.Stream(source.device)
            # Waits spin: the host waits while the device is about to run dry, so it must not
            # have to be woken up first.
            self._copied = [torch.cuda.Event() for _ in range(2)]

    def start_copy(self) -> None:
        """Publish the tensor's value as of the work queued so far."""
        self._last ^= 1
        host = self._host[self._last]
        if not self._on_device:
            host.copy_(self.source)
            return
        current = torch.cuda.current_stream(self.source.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(self.source, non_blocking=True)
            self._copied[self._last].record()

    def before_write(self) -> None:
        """Order what comes next after the last copy: call it before the source is overwritten."""
        if self._on_device:
            torch.cuda.current_stream(self.source.device).wait_event(self._copied[self._last])

    def wait(self) -> np.ndarray:
        """The value published last; waits for its copy."""
        return self._read(self._last)

    def previous(self) -> np.ndarray:
        """The value published before the last one; its copy has normally landed long ago."""
        return self._read(self._last ^ 1)

    def _read(self, index: int) -> np.ndarray:
        if self._on_device:
            self._copied[index].synchronize()
        return self._host[index].numpy()
