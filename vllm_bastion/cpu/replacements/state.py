# SPDX-License-Identifier: Apache-2.0
"""Replacements of kernels that some models need: gated delta state, and M-RoPE."""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.replacements.blocks import copy_bytes, int32_at
from vllm_bastion.cpu.replacements.launch import replacement, row_of

_STATES = "vllm.v1.worker.gpu.model_states"
_MAMBA = "vllm.v1.worker.mamba_utils"


@replacement(f"{_STATES}.mamba_hybrid:_scatter_num_accepted_kernel")
def _scatter_num_accepted(grid0, idx_mapping_ptr, num_sampled_ptr, num_accepted_ptr):
    for i in range(grid0):
        if idx_mapping_ptr[i] >= 0:
            num_accepted_ptr[idx_mapping_ptr[i]] = max(num_sampled_ptr[i], 1)


@replacement(f"{_STATES}.mamba_hybrid:_fill_num_accepted_kernel")
def _fill_num_accepted(grid0, idx_mapping_ptr, num_accepted_ptr, num_sampled):
    for i in range(grid0):
        if idx_mapping_ptr[i] >= 0:
            num_accepted_ptr[idx_mapping_ptr[i]] = num_sampled


@replacement(f"{_MAMBA}:preprocess_mamba_align_fused_kernel")
def _preprocess_mamba_align(
    grid0, idx_mapping_ptr, state_idx_ptr, num_computed_tokens_ptr, query_start_loc_ptr,
    num_accepted_tokens_ptr, src_col_ptr, src_off_ptr, num_reqs, BLOCK_SIZE, MAMBA_BLOCK_SIZE,
):  # fmt: skip
    for i in range(num_reqs):
        slot = idx_mapping_ptr[i]
        column = state_idx_ptr[slot]
        src_col_ptr[slot] = column
        src_off_ptr[slot] = max(num_accepted_tokens_ptr[slot] - 1, 0)
        rows = query_start_loc_ptr[i + 1] - query_start_loc_ptr[i]
        after = num_computed_tokens_ptr[slot] + rows
        last = (after + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
        state_idx_ptr[slot] = last
        if column >= 0 and column != last:
            num_accepted_tokens_ptr[slot] = 1


@njit
def _copy_states(
    slot, src, dst, bias, tables, table_stride, bases, block_strides, elements, inners, widths,
    groups, dim_counts, dim_strides, count, dim_first,
):  # fmt: skip
    """Copy all layers' states of a request between two columns of its rows of the block tables."""
    for s in range(count):
        table = int32_at(np.uint64(tables[groups[s]]), (slot + 1) * table_stride)
        row = row_of(table, table_stride, slot)
        base, stride, element, width = bases[s], block_strides[s], elements[s], widths[s]
        source, target = base + row[src] * stride, base + row[dst] * stride
        if width == 0:  # of the recurrence: each accepted token has a block
            copy_bytes(base + row[src + bias] * stride, target, inners[s] * element)
        elif dim_first:
            for dim in range(dim_counts[s]):
                at = dim * dim_strides[s]
                copy_bytes(source + at + bias * element, target + at, (width - bias) * element)
        else:
            token = inners[s] * element
            copy_bytes(source + bias * token, target, (width - bias) * token)


@replacement(f"{_MAMBA}:precopy_mamba_align_fused_kernel")
def _precopy_mamba_align(
    grid0, grid1, grid2, mamba_state_idx_ptr, src_col_ptr, token_bias_ptr, block_table_ptrs_ptr,
    block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr,
    state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr, state_dim_row_count_ptr,
    state_dim_row_stride_ptr, idx_mapping_ptr, num_reqs, COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST,
    HAS_IDX_MAPPING=True, TEMPORAL_TILES=1,
):  # fmt: skip
    layers = (
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, grid1, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for i in range(num_reqs):
        slot = idx_mapping_ptr[i]
        if slot < 0 or src_col_ptr[slot] < 0 or src_col_ptr[slot] == mamba_state_idx_ptr[slot]:
            continue
        columns = src_col_ptr[slot], mamba_state_idx_ptr[slot]
        _copy_states(slot, *columns, token_bias_ptr[slot], *layers)


@replacement(f"{_MAMBA}:postprocess_mamba_fused_kernel")
def _postprocess_mamba(
    grid0, grid1, grid2, num_accepted_tokens_ptr, mamba_state_idx_ptr, num_scheduled_tokens_ptr,
    num_computed_tokens_ptr, num_draft_tokens_ptr, block_table_ptrs_ptr, block_table_stride_req,
    state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr, state_inner_sizes_ptr,
    state_conv_widths_ptr, state_group_indices_ptr, state_dim_row_count_ptr,
    state_dim_row_stride_ptr, num_accepted_tokens_out_ptr, idx_mapping_ptr, num_reqs, block_size,
    COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=False, PRECOMPUTED_NEW_COMPUTED=False,
    TEMPORAL_TILES=1,
):  # fmt: skip
    # V2 passes request slots and the new number of computed tokens.
    assert HAS_IDX_MAPPING and PRECOMPUTED_NEW_COMPUTED
    layers = (
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, grid1, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for i in range(num_reqs):
        slot = idx_mapping_ptr[i]
        if slot < 0:
            continue
        source, computed = mamba_state_idx_ptr[slot], num_computed_tokens_ptr[slot]
        running = computed - num_accepted_tokens_ptr[slot] + 1
        aligned = computed // block_size * block_size
        if aligned < running:
            continue
        target, bias = aligned // block_size - 1, aligned - running
        if source == target:
            num_accepted_tokens_out_ptr[slot] = 1
            if bias == 0:
                continue
        _copy_states(slot, source, target, bias, *layers)


@replacement("vllm.v1.worker.utils:_zero_kv_blocks_kernel")
def _zero_kv_blocks(
    grid0, grid1, grid2, seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr,
    BLOCK_SIZE,
):  # fmt: skip
    for segment in range(grid1):
        stride = seg_block_strides_ptr[segment]
        size = min(seg_page_sizes_ptr[segment], grid2 * BLOCK_SIZE)
        for i in range(grid0):
            begin = block_ids_ptr[i] * stride
            page = int32_at(seg_addrs_ptr[segment], begin + size)
            for j in range(begin, begin + size):
                page[j] = 0


@replacement("vllm.v1.worker.gpu.mm.rope:_prepare_rope_positions_kernel")
def _prepare_rope_positions(
    grid0, positions_ptr, positions_stride, prefill_positions_ptr, prefill_positions_stride0,
    prefill_positions_stride1, prefill_delta_ptr, idx_mapping_ptr, query_start_loc_ptr,
    prefill_lens_ptr, num_computed_tokens_ptr, BLOCK_SIZE, NUM_DIMS,
):  # fmt: skip
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        computed, start = num_computed_tokens_ptr[slot], query_start_loc_ptr[i]
        for j in range(query_start_loc_ptr[i + 1] - start):
            for dim in range(NUM_DIMS):
                if computed < prefill_lens_ptr[slot]:
                    row = slot * prefill_positions_stride0 + dim * prefill_positions_stride1
                    row_positions = prefill_positions_ptr[row : row + prefill_positions_stride1]
                    pos = row_positions[computed + j]
                else:
                    pos = computed + j + prefill_delta_ptr[slot]
                positions_ptr[dim * positions_stride + start + j] = pos
