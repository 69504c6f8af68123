# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package, in one place.

None is required: settings belong in `--speculative-config`. Values are read at each call, never at
import, so that tests and child processes see the current ones.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Name -> one line of help. A test checks that `docs/configuration.md` names them all.
VARIABLES: dict[str, str] = {
    "VLLM_BASTION_CACHE": ("folder of compiled functions (default `$XDG_CACHE_HOME/vllm-bastion`)"),
    "VLLM_BASTION_TELEMETRY": (
        "0: steps are not recorded, so there are no metrics of trees and no warnings about the "
        "drafter (default 1)"
    ),
}


def readers() -> dict[str, Callable[[], str | None]]:
    """Of each variable, a function that reads its value."""
    return {name: partial(os.environ.get, name) for name in VARIABLES}


def telemetry() -> bool:
    """Whether steps are recorded."""
    return os.environ.get("VLLM_BASTION_TELEMETRY", "1") != "0"


def cache_dir() -> Path:
    """Folder of compiled functions; not created here.

    `bastion_kernels.cpu.cache.root` is the same function: the ops do not import this package, and
    this module must not import PyTorch.
    """
    try:
        if own := os.environ.get("VLLM_BASTION_CACHE"):
            return Path(own).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # HOME is unset and the user id is unknown
        return Path(tempfile.gettempdir()) / f"vllm-bastion-{os.getuid()}"
    return base / "vllm-bastion"


def quiet() -> None:
    """Let vLLM show only errors once it is configured, unless the user has set its level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
