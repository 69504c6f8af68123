# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package, in one place.

None is required: settings belong in `--speculative-config`. Values are read at each call, never at
import, so that tests and child processes see the current ones.
"""

from __future__ import annotations

import os

# `docs/configuration.md` says what they mean. The first is read by `bastion_kernels.cpu.cache`.
VARIABLES = ("VLLM_BASTION_CACHE", "VLLM_BASTION_TELEMETRY")


def value_of(name: str) -> str | None:
    """What a variable is set to, if it is."""
    return os.environ.get(name)


def telemetry() -> bool:
    """Whether steps are recorded."""
    return os.environ.get("VLLM_BASTION_TELEMETRY", "1") != "0"


def quiet() -> None:
    """Let vLLM show only errors once it is configured, unless the user has set its level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
