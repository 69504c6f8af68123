# SPDX-License-Identifier: Apache-2.0
"""How much of this machine's CPUs others use while a calibration runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Of a CPU's times in /proc/stat: what counts as idle.
_IDLE = (3, 4)
_LEAST_IDLE = 0.1  # with more, others did not get in the way


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the machine's start, over the CPUs that this process may use.

    Attributes:
        busy: of all processes.
        idle: of none.
        own: of this process.
    """

    busy: float
    idle: float
    own: float

    @classmethod
    def now(cls) -> CpuTimes | None:
        """The times so far; None if the system does not have them."""
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
        """The share of the CPUs that others used, 0 if the CPUs were not all busy.

        processes: how many like this one belong to the engine.
        """
        busy, idle = end.busy - self.busy, end.idle - self.idle
        others = busy - processes * (end.own - self.own)
        if busy + idle <= 0 or idle > _LEAST_IDLE * (busy + idle):
            return 0.0
        return max(0.0, others / (busy + idle))
