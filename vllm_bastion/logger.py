# SPDX-License-Identifier: Apache-2.0
"""Loggers whose records vLLM shows.

vLLM attaches its handler to the logger named `vllm`. Records of other loggers are not formatted,
and their INFO records are dropped. So all loggers of this package are children of `vllm`.
"""

from __future__ import annotations

import logging


def init_logger(module: str) -> logging.Logger:
    """Logger for one of our modules: `vllm_bastion.envs` -> `vllm.bastion.envs`.

    Args:
        module: the caller's `__name__`.
    """
    return logging.getLogger("vllm.bastion" + module.removeprefix("vllm_bastion"))


def quiet() -> None:
    """Show only errors until vLLM is configured: it warns while it is being imported."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
