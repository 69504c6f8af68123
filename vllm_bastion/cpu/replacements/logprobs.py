# SPDX-License-Identifier: Apache-2.0
"""Replacements of the kernels that report on logits: logprobs, ranks and NaNs.

Exponentials are summed block by block as in the kernels, so that the last bits agree.
"""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.replacements.launch import replacement, row_of

_LOGPROB = "vllm.v1.worker.gpu.sample.logprob"


def log_sum_exp(row, block_size):
    """The maximum of row [V] fp32, and log(sum(exp(row - maximum)))."""
    top = row.max()
    exps = np.zeros(-(-len(row) // block_size) * block_size, dtype=np.float32)
    np.exp(row - top, out=exps[: len(row)])
    total = np.float32(0.0)
    for part in exps.reshape(-1, block_size).sum(axis=1):
        total += part
    return top, np.log(total)


@replacement(f"{_LOGPROB}:_topk_log_softmax_kernel", compile=False)
def _topk_log_softmax(
    grid0, output_ptr, logits_ptr, logits_stride, topk_ids_ptr, topk_ids_stride, topk, vocab_size,
    BLOCK_SIZE, TOPK_BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        row = logits_ptr[i * logits_stride :][:vocab_size]
        top, rest = log_sum_exp(row, BLOCK_SIZE)
        tokens = topk_ids_ptr[i * topk_ids_stride :][:topk]
        output_ptr[i * topk : (i + 1) * topk] = row[tokens] - top - rest


@replacement(f"{_LOGPROB}:_ranks_kernel", compile=False)
def _ranks(grid0, output_ptr, logits_ptr, logits_stride, token_ids_ptr, vocab_size, BLOCK_SIZE):
    padding = -vocab_size % BLOCK_SIZE
    for i in range(grid0):
        row = logits_ptr[i * logits_stride :][:vocab_size]
        value = row[token_ids_ptr[i]]
        # To vLLM, the lanes past the vocabulary are -inf.
        extra = padding if value == -np.inf else 0
        output_ptr[i] = np.count_nonzero(row >= value) + extra


@replacement(f"{_LOGPROB}:_fill_logprob_token_ids_kernel")
def _fill_logprob_token_ids(
    grid0, out_token_ids_ptr, out_token_ids_stride, out_valid_mask_ptr, out_valid_mask_stride,
    sampled_token_ids_ptr, topk_indices_ptr, topk_indices_stride, expanded_idx_mapping_ptr,
    num_per_req_token_ids_ptr, per_req_token_ids_ptr, per_req_token_ids_stride, NUM_TOPK,
    PADDED_COLS,
):  # fmt: skip
    for i in range(grid0):
        tokens = row_of(out_token_ids_ptr, out_token_ids_stride, i)
        valid = row_of(out_valid_mask_ptr, out_valid_mask_stride, i)
        tokens[0], valid[0] = sampled_token_ids_ptr[i], True
        slot = expanded_idx_mapping_ptr[i]
        custom = num_per_req_token_ids_ptr[slot]
        own = row_of(per_req_token_ids_ptr, per_req_token_ids_stride, slot)
        for j in range(min(custom if custom > 0 else NUM_TOPK, PADDED_COLS)):
            token = own[j] if custom > 0 else topk_indices_ptr[i * topk_indices_stride + j]
            tokens[1 + j], valid[1 + j] = token, True


@replacement("vllm.v1.worker.gpu.sample.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def _prompt_logprobs_token_ids(
    grid0, prompt_logprobs_token_ids_ptr, query_start_loc_ptr, idx_mapping_ptr,
    num_computed_tokens_ptr, all_token_ids_ptr, all_token_ids_stride, BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        start, end = query_start_loc_ptr[i], query_start_loc_ptr[i + 1]
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)
        first = num_computed_tokens_ptr[slot] + 1
        for j in range(start, end):
            at = first + j - start
            # The last row has no next token; vLLM drops its result.
            prompt_logprobs_token_ids_ptr[j] = tokens[at] if at < len(tokens) else 0


@replacement("vllm.v1.worker.gpu.metrics.logits:_num_nans_kernel", compile=False)
def _num_nans(grid0, logits_ptr, logits_stride, num_nans_ptr, vocab_size, BLOCK_SIZE):
    for i in range(grid0):
        row = logits_ptr[i * logits_stride :][:vocab_size]
        num_nans_ptr[i] = np.count_nonzero(np.isnan(row))
