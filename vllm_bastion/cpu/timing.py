# SPDX-License-Identifier: Apache-2.0
"""vLLM's step timings on a CPU, where its platform replaces CUDA events by stubs."""

from __future__ import annotations

import time

from vllm.v1.worker.gpu.async_utils import StepTimingCollector, StepTimingEvents


class HostMark:
    """A point on the host's clock with the interface of a CUDA timing event."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from this mark to `end`."""
        return (end._time - self._time) * 1e3


class HostStepTimingCollector(StepTimingCollector):
    """vLLM's collector with marks on the host's clock."""

    def forward_start(self) -> None:
        if self._collecting:
            self._step = StepTimingEvents(HostMark(), HostMark(), HostMark(), HostMark())
            self._step.forward_start.record()
