# SPDX-License-Identifier: Apache-2.0
"""Questions for `test_questions`, in a module that a new process imports at once."""

from __future__ import annotations

import signal
import time

from benchmarks.gpu.questions import Job


def tells(job: Job) -> None:
    """Tells what it lacks of two parts."""
    for part in job.lacks(("a", "b")):
        job.note(part, value=1)


def hangs_after_a_part(job: Job) -> None:
    """Hangs, but only in the first call."""
    known = bool(job.known)
    tells(Job(tell=job.tell, known=frozenset({"b"}) if not known else job.known))
    if not known:
        time.sleep(600)


def hears_nothing(job: Job) -> None:
    """Cannot be interrupted, as native code cannot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)


def breaks(job: Job) -> None:
    """Fails."""
    job.note("a")
    raise ValueError("no such /home/somebody/kernel")
