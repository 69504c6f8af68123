# SPDX-License-Identifier: Apache-2.0
"""Loggers whose records vLLM shows.

vLLM attaches its handler to the logger named `vllm`. Records of other loggers are not formatted,
and their INFO records are dropped. So all loggers of this package are children of `vllm`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def init_logger(module: str) -> logging.Logger:
    """Logger for one of our modules: `vllm_bastion.envs` -> `vllm.bastion.envs`.

    Args:
        module: the caller's `__name__`.
    """
    return logging.getLogger("vllm.bastion" + module.removeprefix("vllm_bastion"))


@contextmanager
def leaving_out(name: str, beginning: str) -> Iterator[None]:
    """Drop messages of one of vLLM's loggers meanwhile, which are wrong for method "bastion".

    Args:
        name: the logger's name.
        beginning: how the messages begin.
    """

    def is_right(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(beginning)

    logger = logging.getLogger(name)
    logger.addFilter(is_right)
    try:
        yield
    finally:
        logger.removeFilter(is_right)


def quiet() -> None:
    """Show only errors until vLLM is configured: it warns while it is being imported."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
