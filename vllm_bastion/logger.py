# SPDX-License-Identifier: Apache-2.0
"""Loggers whose records vLLM shows.

vLLM attaches its handler to the logger named `vllm`. Records of other loggers are not formatted,
and their INFO records are dropped. So all loggers of this package are children of `vllm`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass


def init_logger(module: str) -> logging.Logger:
    """Logger for one of our modules: `vllm_bastion.envs` -> `vllm.bastion.envs`.

    Args:
        module: the caller's `__name__`.
    """
    return logging.getLogger("vllm.bastion" + module.removeprefix("vllm_bastion"))


def leave_out(name: str, beginning: str) -> None:
    """Drop messages of one of vLLM's loggers that are wrong for method "bastion".

    Args:
        name: the logger's name.
        beginning: how the messages begin.
    """
    filter_ = _Beginning(beginning)
    logger = logging.getLogger(name)
    if filter_ not in logger.filters:
        logger.addFilter(filter_)


@dataclass(frozen=True)
class _Beginning(logging.Filter):
    text: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.text)


def quiet() -> None:
    """Show only errors until vLLM is configured: it warns while it is being imported."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
