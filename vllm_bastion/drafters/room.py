# SPDX-License-Identifier: Apache-2.0
"""A drafter's room: for more rows than a step of the target has, and for logits of some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationConfig

# The logits of 64 requests take 0.27 GiB with gamma = 15 and V = 151,936; those of the 1024 that
# vLLM serves at a time by default would take 4.4. No graph of a drafter has more requests.
MOST_AT_ONCE = 64


def parts(hidden: torch.Tensor, num_reqs: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of at most `MOST_AT_ONCE` requests at a time, and which is the first.

    hidden: [num_reqs * D, H], or [num_reqs, D, H].
    """
    step = MOST_AT_ONCE * (len(hidden) // num_reqs)
    for first in range(0, len(hidden), step):
        yield first, hidden[first : first + step]


def by_parts(
    of: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], hidden: torch.Tensor, num_reqs: int
) -> tuple[torch.Tensor, ...]:
    """What `of` makes of the rows, computed for at most `MOST_AT_ONCE` requests at a time."""
    if num_reqs <= MOST_AT_ONCE:
        return of(hidden)
    found = [of(rows) for _, rows in parts(hidden, num_reqs)]
    return tuple(torch.cat(part) for part in zip(*found, strict=True))


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
