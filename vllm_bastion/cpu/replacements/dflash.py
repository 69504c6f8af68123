# SPDX-License-Identifier: Apache-2.0
"""Replacement of the kernel that prepares a DFlash drafter's inputs."""

from __future__ import annotations

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.replacements.launch import replacement, row_of


@njit
def _slot(row, pos, block_size, pad):
    """The cache slot of a position, or `pad`: block 0 is the null block and must not be written."""
    block = row[min(pos // block_size, len(row) - 1)]
    return pad if block == 0 else block * block_size + pos % block_size


@replacement("vllm.v1.worker.gpu.spec_decode.dflash.speculator:_prepare_dflash_inputs_kernel")
def _prepare_dflash_inputs(
    grid0,
    grid1,
    out_input_ids_ptr,
    out_query_positions_ptr,
    out_query_start_loc_ptr,
    out_seq_lens_ptr,
    out_query_slot_mapping_ptr,
    out_context_positions_ptr,
    out_context_slot_mapping_ptr,
    out_sample_indices_ptr,
    out_sample_pos_ptr,
    out_sample_idx_mapping_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    target_positions_ptr,
    target_query_start_loc_ptr,
    idx_mapping_ptr,
    last_sampled_ptr,
    next_prefill_tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    temperature_ptr,
    seeds_ptr,
    block_table_ptr,
    block_table_stride,
    parallel_drafting_token_id,
    block_size,
    num_query_per_req,
    num_speculative_steps,
    max_num_reqs,
    max_num_tokens,
    max_model_len,
    cp_rank,
    SAMPLE_FROM_ANCHOR,
    PAD_SLOT_ID,
    CP_SIZE,
    CP_INTERLEAVE,
    BLOCK_SIZE,
    out_is_padding_ptr=None,  # from vLLM 0.33 on
):
    span = grid1 * BLOCK_SIZE
    first_sample = 0 if SAMPLE_FROM_ANCHOR else 1
    assert CP_SIZE == 1  # vLLM's attention for CPUs has no context parallelism
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        row = row_of(block_table_ptr, block_table_stride, i)
        begin = target_query_start_loc_ptr[i]
        num_context = target_query_start_loc_ptr[i + 1] - begin
        num_valid = num_context - num_rejected_ptr[i]
        if num_sampled_ptr[i] > 0:
            anchor = last_sampled_ptr[slot]
        else:  # still in the prompt, so the prompt's next token
            anchor = next_prefill_tokens_ptr[slot]

        for j in range(min(num_context, span)):
            pos, kv_slot = 0, PAD_SLOT_ID
            if j < num_valid:
                pos = target_positions_ptr[begin + j]
                kv_slot = _slot(row, pos, block_size, PAD_SLOT_ID)
            out_context_positions_ptr[begin + j] = pos
            out_context_slot_mapping_ptr[begin + j] = kv_slot

        last_pos = target_positions_ptr[begin + num_valid - 1]
        base = i * num_query_per_req
        for j in range(min(num_query_per_req, span - num_valid)):
            pos = last_pos + 1 + j
            out_input_ids_ptr[base + j] = anchor if j == 0 else parallel_drafting_token_id
            out_query_positions_ptr[base + j] = min(pos, max_model_len - 1)
            if out_is_padding_ptr is not None:
                out_is_padding_ptr[base + j] = False
            out_query_slot_mapping_ptr[base + j] = _slot(row, pos, block_size, PAD_SLOT_ID)
            if j >= first_sample:
                sample = i * num_speculative_steps + j - first_sample
                out_sample_indices_ptr[sample] = base + j
                out_sample_pos_ptr[sample] = pos + 1 if SAMPLE_FROM_ANCHOR else pos
                out_sample_idx_mapping_ptr[sample] = slot

        out_query_start_loc_ptr[i] = base
        out_seq_lens_ptr[i] = min(last_pos + 1 + num_query_per_req, max_model_len)
        out_temperature_ptr[slot] = temperature_ptr[slot]
        out_seeds_ptr[slot] = seeds_ptr[slot]

    for i in range(grid0, max_num_reqs + 1):
        out_query_start_loc_ptr[i] = grid0 * num_query_per_req
    for i in range(grid0, max_num_reqs):
        out_seq_lens_ptr[i] = 0
    for i in range(grid0 * num_speculative_steps, max_num_reqs * num_speculative_steps):
        out_sample_indices_ptr[i] = 0
        out_sample_pos_ptr[i] = 0
        out_sample_idx_mapping_ptr[i] = -1
    for i in range(grid0 * num_query_per_req, max_num_tokens):
        out_query_slot_mapping_ptr[i] = PAD_SLOT_ID
        if out_is_padding_ptr is not None:
            out_input_ids_ptr[i] = 0
            out_query_positions_ptr[i] = 0
            out_is_padding_ptr[i] = True
