# SPDX-License-Identifier: Apache-2.0
"""Progress of a long step: a moving line on a terminal, and one line at its end anywhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class Progress:
    """Callable with a state such as "decoding, 12 of 192 tokens"."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar = tqdm(
            desc=label, bar_format="{desc}: {postfix} [{elapsed}]", leave=False, disable=None
        )
        self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def __call__(self, state: str) -> None:
        self._bar.set_postfix_str(state)

    def done(self, text: str) -> None:
        """Replace the moving line with a last one."""
        self._bar.close()
        tqdm.write(f"  {self._label}: {text}", file=sys.stderr)
