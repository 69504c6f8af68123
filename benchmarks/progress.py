# SPDX-License-Identifier: Apache-2.0
"""Say what one is waiting for: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\033[K"


class Progress:
    """Callable with a state such as `"decoding, 12 of 192 tokens"`.

    Where the stream is no terminal a line is printed when the part before the comma changes.
    """

    def __init__(self, label: str, stream: TextIO = sys.stderr) -> None:
        self._label, self._stream = label, stream
        self._live = stream.isatty()
        self._begin = time.monotonic()
        self._frame = 0
        self._last = ""

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

    def __call__(self, state: str) -> None:
        if self._live:
            frame = _FRAMES[self._frame % len(_FRAMES)]
            self._frame += 1
            self._stream.write(f"{_CLEAR}{frame} {self._label}: {state}, {self.seconds:.0f} s")
            self._stream.flush()
            return
        phase = state.split(",")[0]
        if phase != self._last:
            self._last = phase
            print(f"  {self._label}: {phase} ...", file=self._stream, flush=True)

    def done(self, text: str) -> None:
        """Replace the line by a last one."""
        clear = _CLEAR if self._live else ""
        print(f"{clear}  {self._label}: {text}", file=self._stream, flush=True)
