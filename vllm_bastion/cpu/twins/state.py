# SPDX-License-Identifier: Apache-2.0
"""Twins of the kernels that some models need: gated delta state, M-RoPE, prompt embeddings."""

from __future__ import annotations

import ctypes

import numpy as np

from vllm_bastion.cpu.twins.blocks import int32_at
from vllm_bastion.cpu.twins.launch import twin

_STATES = "vllm.v1.worker.gpu.model_states"


@twin(f"{_STATES}.mamba_hybrid:_scatter_num_accepted_kernel")
def _scatter_num_accepted(grid0, idx_mapping_ptr, num_sampled_ptr, num_accepted_ptr):
    for i in range(grid0):
        if idx_mapping_ptr[i] >= 0:
            num_accepted_ptr[idx_mapping_ptr[i]] = max(num_sampled_ptr[i], 1)


@twin(f"{_STATES}.mamba_hybrid:_fill_num_accepted_kernel")
def _fill_num_accepted(grid0, idx_mapping_ptr, num_accepted_ptr, num_sampled):
    for i in range(grid0):
        if idx_mapping_ptr[i] >= 0:
            num_accepted_ptr[idx_mapping_ptr[i]] = num_sampled


@twin("vllm.v1.worker.utils:_zero_kv_blocks_kernel")
def _zero_kv_blocks(
    grid0,
    grid1,
    grid2,
    seg_addrs_ptr,
    seg_block_strides_ptr,
    seg_page_sizes_ptr,
    block_ids_ptr,
    BLOCK_SIZE,
):
    for segment in range(grid1):
        stride = seg_block_strides_ptr[segment]
        size = min(seg_page_sizes_ptr[segment], grid2 * BLOCK_SIZE)
        for i in range(grid0):
            begin = block_ids_ptr[i] * stride
            page = int32_at(seg_addrs_ptr[segment], begin + size)
            for j in range(begin, begin + size):
                page[j] = 0


@twin("vllm.v1.worker.gpu.mm.rope:_prepare_rope_positions_kernel")
def _prepare_rope_positions(
    grid0,
    positions_ptr,
    positions_stride,
    prefill_positions_ptr,
    prefill_positions_stride0,
    prefill_positions_stride1,
    prefill_delta_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    prefill_lens_ptr,
    num_computed_tokens_ptr,
    BLOCK_SIZE,
    NUM_DIMS,
):
    for i in range(grid0):
        slot = idx_mapping_ptr[i]
        computed, start = num_computed_tokens_ptr[slot], query_start_loc_ptr[i]
        for j in range(query_start_loc_ptr[i + 1] - start):
            for dim in range(NUM_DIMS):
                if computed < prefill_lens_ptr[slot]:
                    row = slot * prefill_positions_stride0 + dim * prefill_positions_stride1
                    pos = prefill_positions_ptr[row + computed + j]
                else:
                    pos = computed + j + prefill_delta_ptr[slot]
                positions_ptr[dim * positions_stride + start + j] = pos


def _view(address, size, dtype):
    """A view of the `size` numbers at an address."""
    raw = (ctypes.c_byte * (size * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(raw, dtype=dtype)


@twin(f"{_STATES}.prompt_embeds:_apply_prompt_embeds_kernel", compile=False, bits=True)
def _apply_prompt_embeds(
    grid0,
    grid1,
    inputs_embeds_ptr,
    inputs_embeds_stride,
    embeds_ptrs_ptr,
    mask_ptrs_ptr,
    embeds_lens_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    hidden_size,
    TOKEN_BLOCK,
    BLOCK_SIZE,
):
    for i in range(grid0):
        slot = int(idx_mapping_ptr[i])
        given, computed = int(embeds_lens_ptr[slot]), int(num_computed_tokens_ptr[slot])
        start, end = int(query_start_loc_ptr[i]), int(query_start_loc_ptr[i + 1])
        rows = min(end - start, given - computed, grid1 * TOKEN_BLOCK)
        if rows <= 0:
            continue
        embeds = _view(embeds_ptrs_ptr[slot], given * hidden_size, inputs_embeds_ptr.dtype)
        # A prompt may mix both: the mask marks the positions that are token ids.
        masked = mask_ptrs_ptr[slot] != 0
        is_token = _view(mask_ptrs_ptr[slot], given, np.int8) if masked else np.zeros(given)
        for j in range(rows):
            if not is_token[computed + j]:
                source = embeds[(computed + j) * hidden_size :][:hidden_size]
                inputs_embeds_ptr[(start + j) * inputs_embeds_stride :][:hidden_size] = source
