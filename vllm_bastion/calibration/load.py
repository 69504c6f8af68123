# SPDX-License-Identifier: Apache-2.0
"""The share of this machine's CPUs that other processes use during a calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Columns of a CPU's times in /proc/stat that count as idle.
_IDLE = (3, 4)
_LEAST_IDLE = 0.1  # above this idle share, other processes did not slow the calibration


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the machine's start, over the CPUs that this process may use.

    Attributes:
        busy: used by all processes.
        idle: unused.
        own: used by this process.
    """

    busy: float
    idle: float
    own: float

    @classmethod
    def now(cls) -> CpuTimes | None:
        """The times so far; None if the system does not report them."""
        try:
            allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            tick = os.sysconf("SC_CLK_TCK")
            lines = [line.split() for line in _STAT.read_text().splitlines()]
        except (OSError, AttributeError, ValueError):
            return None
        # Time of guests is part of a process's user time.
        times = [
            [int(t) / tick for t in line[1:9]] for line in lines if line[:1] and line[0] in allowed
        ]
        if not times:
            return None
        idle = sum(sum(one[i] for i in _IDLE) for one in times)
        return cls(sum(map(sum, times)) - idle, idle, sum(os.times()[:4]))

    def others_until(self, end: CpuTimes, processes: int = 1) -> float:
        """The share of the CPUs that other processes used; 0 if the CPUs were partly idle.

        processes: number of processes like this one in the engine.
        """
        busy, idle = end.busy - self.busy, end.idle - self.idle
        others = busy - processes * (end.own - self.own)
        if busy + idle <= 0 or idle > _LEAST_IDLE * (busy + idle):
            return 0.0
        return max(0.0, others / (busy + idle))
