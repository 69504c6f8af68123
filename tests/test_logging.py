# SPDX-License-Identifier: Apache-2.0
"""Our log lines reach vLLM's handler, which sits on the logger named `vllm` only."""

from __future__ import annotations

import logging

import pytest

from vllm_bastion.logger import init_logger


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("module", ["vllm_bastion", "vllm_bastion.drafters.dflash"])
def test_info_of_every_module_arrives_at_the_handler_of_vllm(module: str) -> None:
    logger = init_logger(module)
    assert logger.name == "vllm.bastion" + module.removeprefix("vllm_bastion")
    vllm, handler = logging.getLogger("vllm"), _Collect()
    level = vllm.level
    vllm.addHandler(handler)
    vllm.setLevel(logging.INFO)
    try:
        logger.info("budget %d", 7)
    finally:
        vllm.removeHandler(handler)
        vllm.setLevel(level)
    assert handler.lines == ["budget 7"]
