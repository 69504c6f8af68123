# SPDX-License-Identifier: Apache-2.0
"""Replacements of the kernels that prepare and update the batch: inputs, positions and tokens."""

from __future__ import annotations

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.replacements.blocks import int32_at
from vllm_bastion.cpu.replacements.launch import replacement, row_of

_BATCH = "vllm.v1.worker.gpu.input_batch"


@njit
def _write_rows(writes, out, stride, rows, starts, contents, cu_lens):
    for i in range(writes):
        begin = cu_lens[i - 1] if i > 0 else 0
        row = row_of(out, stride, rows[i])
        for j in range(begin, cu_lens[i]):
            row[starts[i] + j - begin] = contents[j]


@njit
def _write_groups(writes, ptrs, strides, rows, starts, contents, cu_lens, groups):
    for i in range(writes):
        begin, end = cu_lens[i - 1] if i > 0 else 0, cu_lens[i]
        stride = strides[groups[i]]
        row = int32_at(ptrs[groups[i]], (rows[i] + 1) * stride)[rows[i] * stride :]
        for j in range(begin, end):
            row[starts[i] + j - begin] = contents[j]


@replacement("vllm.v1.worker.gpu.buffer_utils:_apply_write_kernel", compile=False)
def _apply_write(
    grid0, output_ptr, output_stride, write_indices_ptr, write_starts_ptr, write_contents_ptr,
    write_cu_lens_ptr, write_group_ids_ptr, BLOCK_SIZE, MULTI_GROUP,
):  # fmt: skip
    staged = (write_indices_ptr, write_starts_ptr, write_contents_ptr, write_cu_lens_ptr)
    if MULTI_GROUP:
        _write_groups(grid0, output_ptr, output_stride, *staged, write_group_ids_ptr)
    else:
        _write_rows(grid0, output_ptr, output_stride, *staged)


@replacement(f"{_BATCH}:_prepare_prefill_inputs_kernel")
def _prepare_prefill_inputs(
    grid0, input_ids_ptr, next_prefill_tokens_ptr, next_prefill_tokens_stride, num_lookahead,
    idx_mapping_ptr, query_start_loc_ptr, all_token_ids_ptr, all_token_ids_stride, prefill_lens_ptr,
    num_computed_tokens_ptr, BLOCK_SIZE, LOOKAHEAD_BLOCK,
):  # fmt: skip
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        prefill_len, computed = prefill_lens_ptr[slot], num_computed_tokens_ptr[slot]
        if computed >= prefill_len:
            continue
        start = query_start_loc_ptr[i]
        length = query_start_loc_ptr[i + 1] - start
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)
        for j in range(length):
            input_ids_ptr[start + j] = tokens[computed + j]
        for j in range(min(num_lookahead, LOOKAHEAD_BLOCK)):
            pos = computed + length + j
            token = tokens[pos] if pos < prefill_len else 0
            next_prefill_tokens_ptr[j * next_prefill_tokens_stride + slot] = token


@replacement(f"{_BATCH}:_prepare_pos_seq_lens_kernel")
def _prepare_pos_seq_lens(
    grid0, pos_ptr, seq_lens_ptr, idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr,
    max_num_reqs, BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0 - 1):
        computed = num_computed_tokens_ptr[idx_mapping_ptr[i]]
        start, end = query_start_loc_ptr[i], query_start_loc_ptr[i + 1]
        seq_lens_ptr[i] = computed + end - start
        for j in range(start, end):
            pos_ptr[j] = computed + j - start
    for i in range(grid0 - 1, max_num_reqs):
        seq_lens_ptr[i] = 0


@replacement(f"{_BATCH}:_combine_sampled_and_draft_tokens_kernel")
def _combine_sampled_and_draft_tokens(
    grid0, input_ids_ptr, idx_mapping_ptr, last_sampled_tokens_ptr, query_start_loc_ptr,
    seq_lens_ptr, prefill_len_ptr, draft_tokens_ptr, draft_tokens_stride, cu_num_logits_ptr,
    logits_indices_ptr, BLOCK_SIZE, NUM_NEW_SAMPLED_TOKENS=1,
):  # fmt: skip
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        first = cu_num_logits_ptr[i]
        num_logits = cu_num_logits_ptr[i + 1] - first
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        query_end = query_start_loc_ptr[i + 1]
        begin = query_end - num_logits
        for j in range(min(num_logits, BLOCK_SIZE)):
            logits_indices_ptr[first + j] = begin + j
        seq_len, prefill_len = seq_lens_ptr[i], prefill_len_ptr[slot]
        if seq_len <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - num_logits >= prefill_len:
            input_ids_ptr[begin] = last_sampled_tokens_ptr[slot]
        drafts = row_of(draft_tokens_ptr, draft_tokens_stride, slot)
        for j in range(min(num_drafts, BLOCK_SIZE)):
            input_ids_ptr[query_end - num_drafts + j] = drafts[j]


@replacement(f"{_BATCH}:_get_num_sampled_and_rejected_kernel")
def _get_num_sampled_and_rejected(
    grid0, num_sampled_ptr, num_rejected_ptr, seq_lens_ptr, cu_num_logits_ptr, idx_mapping_ptr,
    prefill_len_ptr,
):  # fmt: skip
    for i in range(grid0):
        num_logits = cu_num_logits_ptr[i + 1] - cu_num_logits_ptr[i]
        if seq_lens_ptr[i] < prefill_len_ptr[idx_mapping_ptr[i]]:
            num_sampled_ptr[i] = 0
            num_rejected_ptr[i] = 0
        else:
            num_rejected_ptr[i] = num_logits - num_sampled_ptr[i]


@replacement(f"{_BATCH}:_post_update_kernel")
def _post_update(
    grid0,
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    output_bin_counts_ptr,
    output_bin_counts_stride,
    sampled_tokens_ptr,
    sampled_tokens_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    # from vLLM 0.33 on
    draft_tokens_ptr=None,
    draft_tokens_out_ptr=None,
    num_draft_tokens=None,
):
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        if slot < 0:
            continue
        if draft_tokens_ptr is not None:
            for j in range(num_draft_tokens):
                token = draft_tokens_ptr[i * num_draft_tokens + j]
                draft_tokens_out_ptr[slot * num_draft_tokens + j] = token
        total_len, num_sampled = total_len_ptr[slot], num_sampled_ptr[i]
        sampled = row_of(sampled_tokens_ptr, sampled_tokens_stride, i)
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)
        if num_sampled > 0:
            last_sampled_tokens_ptr[slot] = sampled[num_sampled - 1]
            total_len_ptr[slot] = total_len + num_sampled
        for j in range(num_sampled):
            tokens[total_len + j] = sampled[j]
            if output_bin_counts_ptr is not None:
                begin = slot * output_bin_counts_stride
                output_bin_counts_ptr[begin : begin + output_bin_counts_stride][sampled[j]] += 1
        delta = -num_rejected_ptr[i]
        if query_start_loc_ptr is not None:
            delta += query_start_loc_ptr[i + 1] - query_start_loc_ptr[i]
        num_computed_tokens_ptr[slot] += delta


@replacement(f"{_BATCH}:_post_update_num_computed_tokens_kernel")
def _post_update_num_computed_tokens(
    grid0, idx_mapping_ptr, num_computed_tokens_ptr, query_start_loc_ptr
):
    for i in range(grid0):
        length = query_start_loc_ptr[i + 1] - query_start_loc_ptr[i]
        num_computed_tokens_ptr[idx_mapping_ptr[i]] += length


@replacement(f"{_BATCH}:_expand_idx_mapping_kernel")
def _expand_idx_mapping(
    grid0, idx_mapping_ptr, expanded_idx_mapping_ptr, expanded_local_pos_ptr, cu_num_logits_ptr,
    BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        start = cu_num_logits_ptr[i]
        for j in range(min(cu_num_logits_ptr[i + 1] - start, BLOCK_SIZE)):
            expanded_idx_mapping_ptr[start + j] = idx_mapping_ptr[i]
            expanded_local_pos_ptr[start + j] = j
