# SPDX-License-Identifier: Apache-2.0
"""Loggers whose records vLLM shows.

vLLM attaches its handler to the logger named `vllm`. Records of other loggers are not formatted,
and their INFO records are dropped. So all loggers of this package are children of `vllm`.
"""

from __future__ import annotations

import logging
from functools import cache


def init_logger(module: str) -> logging.Logger:
    """Logger for one of our modules: `vllm_bastion.envs` -> `vllm.bastion.envs`.

    Args:
        module: the caller's `__name__`.
    """
    return logging.getLogger("vllm.bastion" + module.removeprefix("vllm_bastion"))


@cache
def leave_out(name: str, beginning: str) -> None:
    """Drop messages of one of vLLM's loggers that are wrong for method "bastion".

    vLLM asks for some properties in every step, so only the first call does anything.

    Args:
        name: the logger's name.
        beginning: how the messages begin.
    """
    logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(beginning))


def quiet() -> None:
    """Show only errors until vLLM is configured: it warns while it is being imported."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
