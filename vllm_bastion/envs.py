# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package, in one place.

None is required: settings belong in `--speculative-config`. Values are read at each call, never at
import, so that tests and child processes see the current ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

# `docs/configuration.md` says what they mean. The first is read by `bastion_kernels.cpu.cache`.
VARIABLES = ("VLLM_BASTION_CACHE", "VLLM_BASTION_TELEMETRY")


def readers() -> dict[str, Callable[[], str | None]]:
    """Of each variable, a function that reads its value."""
    return {name: partial(os.environ.get, name) for name in VARIABLES}


def telemetry() -> bool:
    """Whether steps are recorded."""
    return os.environ.get("VLLM_BASTION_TELEMETRY", "1") != "0"


def quiet() -> None:
    """Let vLLM show only errors once it is configured, unless the user has set its level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
