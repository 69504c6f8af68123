# SPDX-License-Identifier: Apache-2.0
"""Loggers that vLLM shows.

vLLM attaches its handler to the logger named `vllm` only: records of any other name lose their
INFO lines and their format. All loggers of this package therefore live under `vllm.bastion`.
"""

from __future__ import annotations

import logging
from typing import Any


def init_logger(module: str) -> Any:
    """Logger for one of our modules.

    Args:
        module: the caller's `__name__`, e.g. `vllm_bastion.budget` -> logger
            `vllm.bastion.budget`.

    Returns:
        vLLM's logger (with `info_once`, `warning_once`) where vLLM is installed, else the standard
        library's: the algorithm files must work without vLLM.
    """
    name = "vllm.bastion" + module.removeprefix("vllm_bastion")
    try:
        from vllm.logger import init_logger as vllm_logger
    except ImportError:
        return logging.getLogger(name)
    return vllm_logger(name)
