# SPDX-License-Identifier: Apache-2.0
"""Replacements of the kernels that draft a chain from candidate scores (DFlash2, LiLiCorr)."""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.noise import DRAFT_SALT, gumbel_at
from vllm_bastion.cpu.replacements.launch import replacement
from vllm_bastion.versions import capabilities

_DFLASH2 = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"


@replacement(f"{_DFLASH2}:_selector_walk_kernel", compile=False)
def _selector_walk(
    grid0,
    scores_ptr,
    candidate_ptr,
    sample_pos_ptr,
    req_state_ptr,
    temperature_ptr,
    seeds_ptr,
    tokens_ptr,
    realized_scores_ptr,
    num_steps,
    top_k,
    BLOCK_K,
    SAMPLE_PROBABILISTIC,
    USE_FP64,
):
    for row in range(grid0):
        slot = int(req_state_ptr[row * num_steps])
        if slot < 0:
            continue
        temperature = temperature_ptr[slot] if SAMPLE_PROBABILISTIC else np.float32(0.0)
        previous = 0
        for step in range(num_steps):
            flat = row * num_steps + step
            scores = scores_ptr[(flat * top_k + previous) * top_k :][:top_k]
            part = slice(flat * top_k, (flat + 1) * top_k)
            noised = scores.astype(np.float64) if USE_FP64 else scores
            if temperature != 0.0:
                seed, pos = int(seeds_ptr[slot]), int(sample_pos_ptr[flat]) - 1 + DRAFT_SALT
                if capabilities().seeds_draft_steps:
                    seed ^= step << 32
                noise = gumbel_at(seed, pos, candidate_ptr[part], fp64=USE_FP64)
                noised = noised / temperature + noise
            previous = int(noised.argmax())
            realized_scores_ptr[part] = scores
            tokens_ptr[flat] = candidate_ptr[part][previous]


@replacement(f"{_DFLASH2}:_cache_draft_logits_kernel")
def _cache_draft_logits(
    grid0,
    draft_logits_ptr,
    cached_candidate_ptr,
    candidate_ptr,
    scores_ptr,
    req_state_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    num_steps,
    top_k,
    BLOCK_K,
):
    for flat in range(grid0):
        slot, step = req_state_ptr[flat], flat % num_steps
        if slot < 0:
            continue
        begin = slot * draft_logits_stride_0 + step * draft_logits_stride_1
        row = draft_logits_ptr[begin : begin + draft_logits_stride_1]
        cached, mine = (slot * num_steps + step) * top_k, flat * top_k
        for k in range(top_k):
            row[cached_candidate_ptr[cached + k]] = -np.inf
        for k in range(top_k):
            token = candidate_ptr[mine + k]
            row[token] = scores_ptr[mine + k]
            cached_candidate_ptr[cached + k] = token
