# SPDX-License-Identifier: Apache-2.0
"""Replacements of kernels that change logits: penalties, bad words, biases, grammars."""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.replacements.launch import replacement, row_of

_SAMPLE = "vllm.v1.worker.gpu.sample"
_INF = np.float32(np.inf)


@replacement(f"{_SAMPLE}.min_p:_min_p_kernel", compile=False)
def _min_p(
    grid0, logits_ptr, logits_stride, expanded_idx_mapping_ptr, min_p_ptr, vocab_size, BLOCK_SIZE
):
    for i in range(grid0):
        min_p = min_p_ptr[expanded_idx_mapping_ptr[i]]
        if min_p != 0.0:
            row = logits_ptr[i * logits_stride :][:vocab_size]
            row[row < row.max() + np.log(min_p)] = -np.inf


@replacement(f"{_SAMPLE}.penalties:_penalties_kernel")
def _penalties(
    grid0, logits_ptr, logits_stride, expanded_idx_mapping_ptr, token_ids_ptr,
    expanded_local_pos_ptr, repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr,
    prompt_bin_mask_ptr, prompt_bin_mask_stride, output_bin_counts_ptr, output_bin_counts_stride,
    vocab_size, BLOCK_SIZE,
):  # fmt: skip
    one = np.float32(1.0)
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        repetition = repetition_penalty_ptr[slot]
        frequency, presence = frequency_penalty_ptr[slot], presence_penalty_ptr[slot]
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        counts = np.empty(vocab_size, dtype=np.int32)
        for v in range(vocab_size):
            counts[v] = output_bin_counts_ptr[slot * output_bin_counts_stride + v]
        # To the penalties, the drafts before this row are output.
        pos = expanded_local_pos_ptr[i]
        for j in range(i - pos + 1, i + 1):
            if 0 <= token_ids_ptr[j] < vocab_size:
                counts[token_ids_ptr[j]] += 1
        for v in range(vocab_size):
            logit = logits_ptr[i * logits_stride + v]
            if repetition != 1.0:
                word = prompt_bin_mask_ptr[slot * prompt_bin_mask_stride + v // 32]
                if counts[v] > 0 or (word >> (v % 32)) & 1:
                    logit = logit * (one / repetition if logit > 0 else repetition)
            logit = logit - frequency * np.float32(counts[v])
            logits_ptr[i * logits_stride + v] = logit - presence * np.float32(counts[v] > 0)


@replacement(f"{_SAMPLE}.penalties:_bincount_kernel")
def _bincount(
    grid0, grid1, expanded_idx_mapping_ptr, all_token_ids_ptr, all_token_ids_stride, prompt_len_ptr,
    prefill_len_ptr, prompt_bin_mask_ptr, prompt_bin_mask_stride, output_bin_counts_ptr,
    output_bin_counts_stride, BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        prompt_len, prefill_len = prompt_len_ptr[slot], prefill_len_ptr[slot]
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)
        mask = row_of(prompt_bin_mask_ptr, prompt_bin_mask_stride, slot)
        counts = row_of(output_bin_counts_ptr, output_bin_counts_stride, slot)
        for j in range(min(prefill_len, grid1 * BLOCK_SIZE)):
            token = tokens[j]
            if j < prompt_len:
                mask[token // 32] |= np.int32(1) << np.int32(token % 32)
            else:
                counts[token] += 1


@replacement(f"{_SAMPLE}.bad_words:_bad_words_kernel")
def _bad_words(
    grid0, grid1, logits_ptr, logits_stride, expanded_idx_mapping_ptr, bad_word_token_ids_ptr,
    bad_word_token_ids_stride, bad_word_offsets_ptr, bad_word_offsets_stride, num_bad_words_ptr,
    all_token_ids_ptr, all_token_ids_stride, prompt_len_ptr, total_len_ptr, input_ids_ptr,
    expanded_local_pos_ptr,
):  # fmt: skip
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        pos = expanded_local_pos_ptr[i]
        output_len = total_len_ptr[slot] - prompt_len_ptr[slot]
        output = all_token_ids_ptr[
            slot * all_token_ids_stride + prompt_len_ptr[slot] : (slot + 1) * all_token_ids_stride
        ]
        words = row_of(bad_word_token_ids_ptr, bad_word_token_ids_stride, slot)
        offsets = row_of(bad_word_offsets_ptr, bad_word_offsets_stride, slot)
        row = row_of(logits_ptr, logits_stride, i)
        for word in range(min(grid1, num_bad_words_ptr[slot])):
            begin, end = offsets[word], offsets[word + 1]
            prefix = end - begin - 1
            if prefix > output_len + pos:
                continue
            match = True
            for j in range(prefix):
                at = output_len + pos - prefix + j
                # This step's drafts follow the output, from the row after the last token's.
                if at >= output_len:
                    actual = input_ids_ptr[i - pos + at - output_len + 1]
                else:
                    actual = output[at]
                match = match and words[begin + j] == actual
            if match:
                row[words[end - 1]] = -_INF


@replacement(f"{_SAMPLE}.logit_bias:_bias_kernel")
def _bias(
    grid0, logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr,
    num_allowed_token_ids_ptr, allowed_token_ids_ptr, allowed_token_ids_stride, num_logit_bias_ptr,
    bias_token_ids_ptr, bias_token_ids_stride, bias_ptr, bias_stride, pos_ptr, min_lens_ptr,
    num_stop_token_ids_ptr, restore_when_all_masked_ptr, stop_token_ids_ptr, stop_token_ids_stride,
    BLOCK_SIZE, LOGITS_BLOCK_SIZE, CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    saved = np.empty(BLOCK_SIZE, dtype=np.float32)
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        row = logits_ptr[i * logits_stride : i * logits_stride + vocab_size]

        num_allowed = min(num_allowed_token_ids_ptr[slot], BLOCK_SIZE)
        allowed = row_of(allowed_token_ids_ptr, allowed_token_ids_stride, slot)
        if num_allowed > 0:
            for j in range(num_allowed):
                saved[j] = row[allowed[j]]
            row[:] = -_INF
            for j in range(num_allowed):
                row[allowed[j]] = saved[j]

        num_bias = min(num_logit_bias_ptr[slot], BLOCK_SIZE)
        tokens = row_of(bias_token_ids_ptr, bias_token_ids_stride, slot)
        biases = row_of(bias_ptr, bias_stride, slot)
        for j in range(num_bias):
            saved[j] = row[tokens[j]] + biases[j]
        for j in range(num_bias):
            row[tokens[j]] = saved[j]

        num_stop = min(num_stop_token_ids_ptr[slot], BLOCK_SIZE)
        if num_stop <= 0 or pos_ptr[i] + 1 >= min_lens_ptr[slot]:
            continue
        stop = row_of(stop_token_ids_ptr, stop_token_ids_stride, slot)
        for j in range(num_stop):
            saved[j] = row[stop[j]]
        for j in range(num_stop):
            row[stop[j]] = -_INF
        if CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[slot] and row.max() == -_INF:
            for j in range(num_stop):
                if -_INF < saved[j] < _INF:
                    row[stop[j]] = saved[j]


@replacement("vllm.v1.worker.gpu.structured_outputs:_apply_grammar_bitmask_kernel")
def _apply_grammar_bitmask(
    grid0, logits_ptr, logits_stride, logits_indices_ptr, cu_num_logits_ptr, bitmask_ptr,
    bitmask_stride, vocab_size, MASK_STRIDE, BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        request, position = (
            logits_indices_ptr[i] // MASK_STRIDE,
            logits_indices_ptr[i] % MASK_STRIDE,
        )
        first = cu_num_logits_ptr[request]
        if position >= cu_num_logits_ptr[request + 1] - first:
            continue
        row = (first + position) * logits_stride
        # Whole words first: most allow all 32 tokens.
        for w in range((vocab_size + 31) // 32):
            word = bitmask_ptr[i * bitmask_stride + w] if w < bitmask_stride else 0
            if word != -1:
                for v in range(32 * w, min(32 * w + 32, vocab_size)):
                    if (word >> (v % 32)) & 1 == 0:
                        logits_ptr[row + v] = -_INF
