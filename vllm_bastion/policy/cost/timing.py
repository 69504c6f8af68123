# SPDX-License-Identifier: Apache-2.0
"""Times of real steps, measured without making the device or the host wait.

Marks are CUDA events in a ring; a step's times are read some steps later, once its last event has
completed. On a CPU a mark reads the host's clock, because vLLM's CPU platform replaces CUDA events
with stubs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from vllm_bastion.step_times import StepTimes

_RING = 16  # most steps whose times have not been read yet


class HostMark:
    """A point on the host's clock with the interface of a CUDA timing event."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from this mark to `end`."""
        return (end._time - self._time) * 1e3


def new_mark(device: torch.device) -> Any:
    """A mark for work on `device`: a `torch.cuda.Event`, or a `HostMark`."""
    return HostMark() if device.type == "cpu" else torch.cuda.Event(enable_timing=True)


class _Step:
    """A step that is timed. marks: forward start, logits ready, end of the step."""

    def __init__(self, device: torch.device) -> None:
        self.marks = new_mark(device), new_mark(device), new_mark(device)
        self.follows = False  # whether the step before it was timed too
        self.times: StepTimes


class StepTimer:
    """Marks three points of every decode step, and returns the times once they are complete."""

    def __init__(self, device: torch.device) -> None:
        self._free = [_Step(device) for _ in range(_RING)]
        self._on_device = device.type != "cpu"
        # Of the step that is running: to ask for it takes longer than to record a mark.
        self._stream: torch.cuda.Stream | None = None
        self._running: _Step | None = None
        self._drafting: _Step | None = None
        self._pending: deque[_Step] = deque()
        # The step before the oldest pending one; the latter's total time begins at its end.
        self._before: _Step | None = None
        self._last_step_timed = False

    def forward_start(self, rows: int, num_reqs: int, context_len: float) -> None:
        """Just before the target's forward pass. A step is not timed while the ring is full."""
        if self._running is not None or self._drafting is not None or not self._free:
            self.interrupted()
        if self._free:
            step = self._running = self._free.pop()
            # What the step does and its times follow in `step_done` and `completed`.
            step.times = StepTimes(rows, num_reqs, context_len, True, True, 0.0, None)
            step.follows = self._last_step_timed
            self._stream = torch.cuda.current_stream() if self._on_device else None
            step.marks[0].record(self._stream)

    def interrupted(self) -> None:
        """A step was not timed, or ended early: the next step's total time is unknown."""
        self._free += [step for step in (self._running, self._drafting) if step is not None]
        self._running = self._drafting = None
        self._last_step_timed = False

    def logits_ready(self) -> None:
        """At the entry of the rejection sampler."""
        if self._running is not None:
            self._running.marks[1].record(self._stream)
            self._drafting, self._running = self._running, None

    def step_done(self, drafted: bool, spared: int = 0, looked: bool = False) -> None:
        """After the drafter. A step that verifies nothing never calls `logits_ready`.

        spared: positions of each block that the drafter did not predict.
        looked: whether the step looked for copies.
        """
        if self._running is not None:
            self.logits_ready()
            assert self._drafting is not None
            self._drafting.times.verified = False
        if self._drafting is not None:
            times = self._drafting.times
            times.drafted, times.spared, times.looked = drafted, spared, looked
            self._drafting.marks[2].record(self._stream)
            self._pending.append(self._drafting)
            self._drafting = None
            self._last_step_timed = True

    @property
    def num_pending(self) -> int:
        """Steps whose times `completed` has not returned yet."""
        return len(self._pending)

    def completed(self) -> Iterator[StepTimes]:
        """Times of the steps that have completed on the device, oldest first."""
        while self._pending and self._pending[0].marks[2].query():
            step = self._pending.popleft()
            start, logits, end = step.marks
            before, self._before = self._before, step
            step.times.forward_ms = start.elapsed_time(logits)
            if before is not None and step.follows:
                step.times.total_ms = before.marks[2].elapsed_time(end)
                step.times.copies = step.times.verified and not before.times.drafted
            yield step.times
            if before is not None:
                self._free.append(before)
