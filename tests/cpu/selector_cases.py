# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that walk through a drafter's scored candidates."""

from __future__ import annotations

import torch

from tests.cpu.twin_cases import REQS, SLOTS, STEPS, VOCAB, Draw, Launch, case

_DFLASH2 = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"
_K = 6


def _candidates(draw: Draw, rows: int) -> torch.Tensor:
    """[rows, K] int64, distinct in a row."""
    return draw.floats(rows, VOCAB).argsort(-1)[:, :_K].contiguous()


def _walk(draw: Draw, probabilistic: bool, fp64: bool) -> Launch:
    scores = draw.floats(REQS, STEPS, _K, _K)
    if draw.hostile:
        scores = (scores * 2).round()
        scores[0, 1:] = -torch.inf
    slots = draw.slots(negative=True)
    args = {
        "scores_ptr": scores,
        "candidate_ptr": _candidates(draw, REQS * STEPS),
        "sample_pos_ptr": draw.ints(1, 300, REQS * STEPS, dtype=torch.int64),
        "req_state_ptr": slots.to(torch.int64).repeat_interleave(STEPS),
        "temperature_ptr": draw.temperatures(),
        "seeds_ptr": draw.seeds(),
        "tokens_ptr": torch.full((REQS, STEPS), -9, dtype=torch.int64),
        "realized_scores_ptr": torch.zeros(REQS, STEPS, _K),
        "num_steps": STEPS,
        "top_k": _K,
        "BLOCK_K": 8,
        "SAMPLE_PROBABILISTIC": probabilistic,
        "USE_FP64": fp64,
    }
    return Launch((REQS,), args)


@case(f"{_DFLASH2}:_selector_walk_kernel")
def walk(draw: Draw) -> Launch:
    return _walk(draw, probabilistic=False, fp64=False)


@case(f"{_DFLASH2}:_selector_walk_kernel/sampled")
def walk_sampled(draw: Draw) -> Launch:
    return _walk(draw, probabilistic=True, fp64=False)


@case(f"{_DFLASH2}:_selector_walk_kernel/fp64")
def walk_fp64(draw: Draw) -> Launch:
    return _walk(draw, probabilistic=True, fp64=True)


@case(f"{_DFLASH2}:_cache_draft_logits_kernel")
def cache_draft_logits(draw: Draw) -> Launch:
    slots = draw.slots(negative=True)
    logits = draw.rows(draw.floats(SLOTS * STEPS, VOCAB))
    args = {
        "draft_logits_ptr": logits,
        "cached_candidate_ptr": _candidates(draw, SLOTS * STEPS),
        "candidate_ptr": _candidates(draw, REQS * STEPS),
        "scores_ptr": draw.floats(REQS, STEPS, _K),
        "req_state_ptr": slots.to(torch.int64).repeat_interleave(STEPS),
        "draft_logits_stride_0": STEPS * logits.stride(0),
        "draft_logits_stride_1": logits.stride(0),
        "num_steps": STEPS,
        "top_k": _K,
        "BLOCK_K": 8,
    }
    return Launch((REQS * STEPS,), args)
