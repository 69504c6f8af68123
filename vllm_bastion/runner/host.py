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
    """A device tensor's last published value, readable on the host.

    On CPU the mirror is the tensor itself. On CUDA ``start_copy`` enqueues a copy into pinned
    memory on a stream of its own, ordered after the work queued so far; ``wait`` blocks until the
    last one has landed.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._host = source
        self._on_device = source.device.type != "cpu"
        if self._on_device:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source)
            self._stream = torch.cuda.Stream(source.device)
            # blocking=True sleeps instead of spinning on the driver's lock, as vLLM does.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)

    def start_copy(self) -> None:
        """Publish the tensor's value as of the work queued so far."""
        if not self._on_device:
            return
        current = torch.cuda.current_stream(self._source.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._source, non_blocking=True)
            self._copied.record(self._stream)
        # The next `grow` must not overwrite the source while it is being read.
        current.wait_event(self._copied)

    def wait(self) -> np.ndarray:
        """The last published value; waits for its copy."""
        if self._on_device:
            self._copied.synchronize()
        return self._host.numpy()
