# SPDX-License-Identifier: Apache-2.0
"""Questions for `test_questions`, in a module that a new process imports at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path


def tells(out: Path, small: bool) -> None:
    """Prints its answer."""
    print("the answer")


def hangs_once(out: Path, small: bool) -> None:
    """Hangs, but only in the first call."""
    if not (out / "hung").exists():
        (out / "hung").touch()
        time.sleep(600)


def hears_nothing(out: Path, small: bool) -> None:
    """Cannot be interrupted, as native code cannot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)


def breaks(out: Path, small: bool) -> None:
    """Fails."""
    raise ValueError("no such /home/somebody/kernel")
