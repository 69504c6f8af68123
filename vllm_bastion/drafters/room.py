# SPDX-License-Identifier: Apache-2.0
"""A drafter's configuration with room for more rows than a step of the target has."""

from __future__ import annotations

import copy

from vllm.config import VllmConfig
from vllm.config.compilation import CompilationConfig


def with_room(vllm_config: VllmConfig) -> VllmConfig:
    """A configuration whose batch token limit holds gamma + 1 rows of every request.

    vLLM sizes its drafter's buffers by that limit, and otherwise limits the requests of a step.
    """
    spec_config, scheduler_config = vllm_config.speculative_config, vllm_config.scheduler_config
    assert spec_config is not None
    rows = scheduler_config.max_num_seqs * (spec_config.num_speculative_tokens + 1)
    view = copy.copy(vllm_config)
    view.scheduler_config = copy.copy(scheduler_config)
    view.scheduler_config.max_num_batched_tokens = max(
        rows, scheduler_config.max_num_batched_tokens
    )
    return view


def for_all_rows(compilation: CompilationConfig, step_rows: int) -> CompilationConfig:
    """A copy of the target's settings: vLLM writes the compiled row ranges into them.

    step_rows: the most rows of a step of the target.
    """
    compilation = copy.copy(compilation)
    if compilation.compile_ranges_endpoints:
        # One range up to the drafter's limit: no second one at the target's.
        compilation.compile_ranges_endpoints = [
            end for end in compilation.compile_ranges_endpoints if end != step_rows
        ]
    return compilation
