# SPDX-License-Identifier: Apache-2.0
"""Replacements of the rejection sampler, which verifies the chains of vLLM's own methods.

Block verification and FLy, which are off by default in vLLM, have none.
"""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.replacements.gumbel import block_argmax, noised
from vllm_bastion.cpu.replacements.launch import replacement

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
_MASK = 0xFFFFFFFF


def philox_uniform(seed, offset):
    """Triton's `rand`, without its zero: a fp32 number in (0, 1) from a seed and an offset."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = offset & _MASK, (offset >> 32) & _MASK, 0, 0
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ key0, b & _MASK, (a >> 32) ^ c3 ^ key1, a & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    positive = c0 ^ _MASK if c0 >> 31 else c0
    scale = np.float32(4.6566127342e-10)
    return max(np.float32(positive) * scale, scale)


def _padded(values, size, fill):
    out = np.full(size, fill, dtype=np.float32)
    out[: len(values)] = values
    return out


def _max_and_sum_exp(logits, block_size):
    top = logits.max()
    if not top > -np.inf:
        return top, np.float32(0.0)
    return top, _padded(np.exp(logits - top), block_size, 0.0).sum()


def _log_sum_exp(maxes, sums, padded):
    maxes, sums = _padded(maxes, padded, -np.inf), _padded(sums, padded, 0.0)
    top = maxes.max()
    return top + np.log((sums * np.exp(maxes - top)).sum())


@replacement(f"{_SAMPLER}:_flatten_sampled_kernel")
def _flatten_sampled(
    grid0, flat_sampled_ptr, sampled_ptr, sampled_stride, num_sampled_ptr, cu_num_logits_ptr
):
    for i in range(grid0):
        sampled = sampled_ptr[i * sampled_stride : (i + 1) * sampled_stride]
        for j in range(num_sampled_ptr[i]):
            flat_sampled_ptr[cu_num_logits_ptr[i] + j] = sampled[j]


@replacement(f"{_SAMPLER}:_gather_draft_sampled_kernel")
def _gather_draft_sampled(
    grid0,
    draft_sampled_ptr,
    pos_ptr,
    input_ids_ptr,
    positions_ptr,
    logits_indices_ptr,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    prefill_len_ptr,
    num_logits,
    BLOCK_SIZE,
):
    for i in range(min(num_logits, grid0 * BLOCK_SIZE)):
        token = logits_indices_ptr[i]
        local_pos, pos = expanded_local_pos_ptr[i], positions_ptr[token]
        # A draft of a step that begins within the prompt is a placeholder.
        prefill_len = prefill_len_ptr[expanded_idx_mapping_ptr[i]]
        placeholder = local_pos > 0 and pos - local_pos < prefill_len
        draft_sampled_ptr[i] = -1 if placeholder else input_ids_ptr[token]
        pos_ptr[i] = pos


@replacement(f"{_UTILS}:_compute_local_logits_stats_kernel", compile=False)
def _compute_local_logits_stats(
    grid0,
    grid1,
    target_local_argmax_ptr,
    target_local_argmax_stride,
    target_local_max_ptr,
    target_local_max_stride,
    target_local_sumexp_ptr,
    target_local_sumexp_stride,
    draft_local_max_ptr,
    draft_local_max_stride,
    draft_local_sumexp_ptr,
    draft_local_sumexp_stride,
    target_logits_ptr,
    target_logits_stride,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    temp_ptr,
    vocab_size,
    num_speculative_steps,
    num_logits,
    BLOCK_SIZE,
    HAS_DRAFT_LOGITS,
):
    for i in range(grid0):
        step = int(expanded_local_pos_ptr[i])
        if num_logits is None:
            bonus = step >= num_speculative_steps
        else:
            bonus = i + 1 >= num_logits or expanded_local_pos_ptr[i + 1] == 0
        if bonus:
            continue
        slot = int(expanded_idx_mapping_ptr[i])
        temperature = temp_ptr[slot]
        target = target_logits_ptr[i * target_logits_stride :][:vocab_size]
        maxes = target_local_max_ptr[i * target_local_max_stride :]
        if temperature == 0.0:
            argmaxes = target_local_argmax_ptr[i * target_local_argmax_stride :]
            block_argmax(target, vocab_size, BLOCK_SIZE, grid1, maxes, argmaxes)
            continue
        sums = target_local_sumexp_ptr[i * target_local_sumexp_stride :]
        for block in range(grid1):
            part = target[block * BLOCK_SIZE :][:BLOCK_SIZE]
            maxes[block], sums[block] = _max_and_sum_exp(part, BLOCK_SIZE)
        if HAS_DRAFT_LOGITS:
            begin = slot * draft_logits_stride_0 + step * draft_logits_stride_1
            draft = draft_logits_ptr[begin:][:vocab_size] / temperature
            maxes = draft_local_max_ptr[i * draft_local_max_stride :]
            sums = draft_local_sumexp_ptr[i * draft_local_sumexp_stride :]
            for block in range(grid1):
                part = draft[block * BLOCK_SIZE :][:BLOCK_SIZE]
                maxes[block], sums[block] = _max_and_sum_exp(part, BLOCK_SIZE)


@replacement(f"{_UTILS}:_rejection_kernel", compile=False)
def _rejection(
    grid0,
    sampled_ptr,
    sampled_stride,
    rejected_steps_ptr,
    target_rejected_logsumexp_ptr,
    draft_rejected_logsumexp_ptr,
    target_logits_ptr,
    target_logits_stride,
    target_local_argmax_ptr,
    target_local_argmax_stride,
    target_local_max_ptr,
    target_local_max_stride,
    target_local_sumexp_ptr,
    target_local_sumexp_stride,
    draft_sampled_ptr,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    draft_local_max_ptr,
    draft_local_max_stride,
    draft_local_sumexp_ptr,
    draft_local_sumexp_stride,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temp_ptr,
    seed_ptr,
    pos_ptr,
    synthetic_conditional_rates_ptr,
    cumulative_log_p_ptr,
    local_residual_mass_ptr,
    local_residual_mass_stride,
    fly_entropy_ptr,
    fly_entropy_threshold,
    vocab_num_blocks,
    PADDED_VOCAB_NUM_BLOCKS,
    HAS_DRAFT_LOGITS,
    SYNTHETIC_MODE,
    USE_BLOCK_VERIFICATION,
    FLY_WINDOW_SIZE,
):
    assert not USE_BLOCK_VERIFICATION and not FLY_WINDOW_SIZE
    for i in range(grid0):
        slot = int(idx_mapping_ptr[i])
        start, end = int(cu_num_logits_ptr[i]), int(cu_num_logits_ptr[i + 1])
        temperature = temp_ptr[slot]
        sampled = sampled_ptr[i * sampled_stride : (i + 1) * sampled_stride]
        accepted_length, target_lse, draft_lse = 0, np.float32(0.0), np.float32(0.0)
        for step in range(end - start - 1):
            row = start + step
            draft = int(draft_sampled_ptr[row + 1])
            if temperature != 0.0 and draft < 0:
                break
            uniform = philox_uniform(int(seed_ptr[slot]), int(pos_ptr[row]))
            if SYNTHETIC_MODE:
                accepted = uniform < synthetic_conditional_rates_ptr[step]
            maxes = target_local_max_ptr[row * target_local_max_stride :][:vocab_num_blocks]
            if temperature == 0.0:
                best = np.where(np.isnan(maxes), -np.inf, maxes).argmax()
                argmax = target_local_argmax_ptr[row * target_local_argmax_stride + best]
                if not SYNTHETIC_MODE:
                    accepted = argmax == draft
                accepted = accepted and draft >= 0
                sampled[step] = draft if accepted else argmax
            else:
                sums = target_local_sumexp_ptr[row * target_local_sumexp_stride :]
                target_lse = _log_sum_exp(maxes, sums[:vocab_num_blocks], PADDED_VOCAB_NUM_BLOCKS)
                target = target_logits_ptr[row * target_logits_stride + draft] - target_lse
                proposed = np.float32(0.0)
                if HAS_DRAFT_LOGITS:
                    maxes = draft_local_max_ptr[row * draft_local_max_stride :]
                    sums = draft_local_sumexp_ptr[row * draft_local_sumexp_stride :]
                    draft_lse = _log_sum_exp(
                        maxes[:vocab_num_blocks], sums[:vocab_num_blocks], PADDED_VOCAB_NUM_BLOCKS
                    )
                    at = slot * draft_logits_stride_0 + step * draft_logits_stride_1 + draft
                    proposed = draft_logits_ptr[at] / temperature - draft_lse
                if not SYNTHETIC_MODE:
                    accepted = target > np.log(uniform) + proposed
                sampled[step] = draft
            if not accepted:
                break
            accepted_length += 1
        rejected_steps_ptr[i] = accepted_length
        target_rejected_logsumexp_ptr[i] = target_lse
        draft_rejected_logsumexp_ptr[i] = draft_lse


@replacement(f"{_UTILS}:_resample_kernel", compile=False)
def _resample(
    grid0,
    grid1,
    resampled_local_argmax_ptr,
    resampled_local_argmax_stride,
    resampled_local_max_ptr,
    resampled_local_max_stride,
    target_logits_ptr,
    target_logits_stride,
    target_rejected_logsumexp_ptr,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    draft_rejected_logsumexp_ptr,
    rejected_step_ptr,
    cu_num_logits_ptr,
    expanded_idx_mapping_ptr,
    draft_sampled_ptr,
    temp_ptr,
    seed_ptr,
    pos_ptr,
    cumulative_log_p_ptr,
    contexts_ptr,
    contexts_stride,
    watermarking_ptr,
    watermarking_skip_mask_ptr,
    watermark_key_0,
    watermark_key_1,
    vocab_size,
    BLOCK_SIZE,
    HAS_DRAFT_LOGITS,
    USE_FP64,
    USE_BLOCK_VERIFICATION,
    CONTEXT_WIDTH,
    WATERMARK,
    DEDUPLICATE_CONTEXTS,
):
    assert not USE_BLOCK_VERIFICATION and not WATERMARK
    for i in range(grid0):
        step = int(rejected_step_ptr[i])
        row = int(cu_num_logits_ptr[i]) + step
        slot = int(expanded_idx_mapping_ptr[row])
        temperature = np.float32(0.0) if slot < 0 else temp_ptr[slot]
        bonus = row == cu_num_logits_ptr[i + 1] - 1
        if temperature == 0.0 and not bonus:
            continue
        logits = target_logits_ptr[row * target_logits_stride :][:vocab_size]
        rejected = -1 if bonus else int(draft_sampled_ptr[row + 1])
        if rejected >= 0 and HAS_DRAFT_LOGITS:
            begin = slot * draft_logits_stride_0 + step * draft_logits_stride_1
            draft = draft_logits_ptr[begin:][:vocab_size] / temperature
            draft = draft - draft_rejected_logsumexp_ptr[i]
            target = logits - target_rejected_logsumexp_ptr[i]
            ratio = np.exp(draft - target)
            residual = np.full_like(target, -np.inf)
            # log(p - q) where p > q
            np.add(target, np.log1p(-ratio, where=ratio < 1.0), out=residual, where=ratio < 1.0)
            logits = residual
        elif rejected >= 0:
            logits = logits.copy()
            logits[rejected] = -np.inf
        if temperature != 0.0:
            logits = noised(logits, temperature, seed_ptr[slot], pos_ptr[row], USE_FP64)
        block_argmax(
            logits,
            vocab_size,
            BLOCK_SIZE,
            grid1,
            resampled_local_max_ptr[i * resampled_local_max_stride :],
            resampled_local_argmax_ptr[i * resampled_local_argmax_stride :],
        )


@replacement(f"{_UTILS}:_insert_resampled_kernel", compile=False)
def _insert_resampled(
    grid0,
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    resampled_local_argmax_ptr,
    resampled_local_argmax_stride,
    resampled_local_max_ptr,
    resampled_local_max_stride,
    resample_num_blocks,
    cu_num_logits_ptr,
    expanded_idx_mapping_ptr,
    temp_ptr,
    PADDED_RESAMPLE_NUM_BLOCKS,
):
    for i in range(grid0):
        step = int(num_sampled_ptr[i])
        row = int(cu_num_logits_ptr[i]) + step
        num_sampled_ptr[i] = step + 1
        bonus = row == cu_num_logits_ptr[i + 1] - 1
        if temp_ptr[expanded_idx_mapping_ptr[row]] == 0.0 and not bonus:
            continue
        maxes = resampled_local_max_ptr[i * resampled_local_max_stride :][:resample_num_blocks]
        best = np.where(np.isnan(maxes), -np.inf, maxes).argmax()
        sampled = sampled_ptr[i * sampled_stride : (i + 1) * sampled_stride]
        sampled[step] = resampled_local_argmax_ptr[i * resampled_local_argmax_stride + best]
