# SPDX-License-Identifier: Apache-2.0
"""Long jobs that make room for others."""

from __future__ import annotations

import time
from pathlib import Path


def wait_while(file: Path | None) -> None:
    """Sleep while the file exists."""
    while file is not None and file.exists():
        time.sleep(1.0)
