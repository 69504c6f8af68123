# SPDX-License-Identifier: Apache-2.0
"""Sizes of a drafter's buffers: more rows than a step of the target, and logits in parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationConfig

# The logits of 64 requests take 0.27 GiB with gamma = 15 and V = 151,936; those of 1024, which vLLM
# serves at a time by default, would take 4.4. No graph of a drafter has more requests than 64.
LOGITS_CHUNK_REQS = 64
# Step, in requests, between a drafter's graph sizes beyond the target's largest one.
_GRAPH_STEP = 4


def parts(hidden: torch.Tensor, num_reqs: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of at most `LOGITS_CHUNK_REQS` requests at a time, each with its first row's index.

    hidden: [num_reqs * D, H], or [num_reqs, D, H].
    """
    step = LOGITS_CHUNK_REQS * (len(hidden) // num_reqs)
    for first in range(0, len(hidden), step):
        yield first, hidden[first : first + step]


def by_parts(
    of: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], hidden: torch.Tensor, num_reqs: int
) -> tuple[torch.Tensor, ...]:
    """`of(rows)`, computed for at most `LOGITS_CHUNK_REQS` requests at a time."""
    if num_reqs <= LOGITS_CHUNK_REQS:
        return of(hidden)
    found = [of(rows) for _, rows in parts(hidden, num_reqs)]
    return tuple(torch.cat(part) for part in zip(*found, strict=True))


def with_capacity(vllm_config: VllmConfig) -> VllmConfig:
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
        # One range up to the drafter's limit, without a split at the target's.
        compilation.compile_ranges_endpoints = [
            end for end in compilation.compile_ranges_endpoints if end != step_rows
        ]
    return compilation


def with_graphs(vllm_config: VllmConfig, rows: int) -> VllmConfig:
    """A configuration by which a drafter gets CUDA graphs for up to `LOGITS_CHUNK_REQS` requests.

    vLLM captures a drafter at the target's sizes; the largest, 512 rows, holds 32 blocks of 16.

    rows: of a request's block.
    """
    compilation, reqs = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
    sizes, most = compilation.cudagraph_capture_sizes or [], min(reqs, LOGITS_CHUNK_REQS)
    if not sizes:
        return vllm_config
    sizes = [size for size in sizes if size <= rows * LOGITS_CHUNK_REQS]
    largest = max(sizes, default=0)
    more = [*range(largest // rows + _GRAPH_STEP, most, _GRAPH_STEP), most]
    more = [rows * count for count in more if rows * count > largest]
    view = copy.copy(vllm_config)
    view.compilation_config = copy.copy(compilation)
    view.compilation_config.cudagraph_capture_sizes = sorted([*sizes, *more])
    view.compilation_config.max_cudagraph_capture_size = max([*sizes, *more])
    return view
