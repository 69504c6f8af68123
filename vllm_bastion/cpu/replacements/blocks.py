# SPDX-License-Identifier: Apache-2.0
"""Replacements of the block table's kernels, which get the address of each group's table."""

from __future__ import annotations

from numba import carray, types
from numba.extending import intrinsic

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.replacements.launch import replacement, row_of

_BLOCKS = "vllm.v1.worker.gpu.block_table"


def _pointer_to(item):
    """An intrinsic that turns an integer address into a pointer to Numba's type `item`."""

    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(item)(address), generate

    return pointer


_int32_pointer, _byte_pointer = _pointer_to(types.int32), _pointer_to(types.uint8)


@njit
def int32_at(address, size):
    """The `size` int32 at a uint64 address."""
    return carray(_int32_pointer(address), (size,))


@njit
def copy_bytes(source, target, size):
    """Copy in ascending order, so that overlapping bytes may move to a lower address."""
    given, out = carray(_byte_pointer(source), (size,)), carray(_byte_pointer(target), (size,))
    for i in range(size):
        out[i] = given[i]


@replacement(f"{_BLOCKS}:_gather_block_tables_kernel")
def _gather_block_tables(
    grid0,
    grid1,
    batch_idx_to_req_idx,
    src_block_table_ptrs,
    dst_block_table_ptrs,
    block_table_strides,
    num_blocks_ptr,
    num_blocks_stride,
    num_reqs,
    BLOCK_SIZE,
    # from vLLM 0.33 on
    num_computed_tokens_ptr=None,
    sliding_window_reach_ptr=None,
    block_sizes_ptr=None,
    MASK_SLIDING_WINDOW=None,
):
    for group in range(grid0):
        stride = block_table_strides[group]
        src = int32_at(src_block_table_ptrs[group], num_blocks_stride * stride)
        dst = int32_at(dst_block_table_ptrs[group], grid1 * stride)
        for i in range(grid1):
            if i >= num_reqs:
                for j in range(stride):
                    dst[i * stride + j] = 0
                continue
            slot = batch_idx_to_req_idx[i]
            null = 0  # blocks below the window, which may belong to another request by now
            # Nested, because Numba must not type the inner test where the pointer is None.
            if num_computed_tokens_ptr is not None:  # noqa: SIM102
                if MASK_SLIDING_WINDOW and sliding_window_reach_ptr[group] > 0:
                    below = num_computed_tokens_ptr[slot] - sliding_window_reach_ptr[group]
                    null = max(below, 0) // block_sizes_ptr[group]
            blocks = row_of(src, stride, slot)
            row = row_of(dst, stride, i)
            for j in range(num_blocks_ptr[group * num_blocks_stride + slot]):
                row[j] = blocks[j] if j >= null else 0


@replacement(f"{_BLOCKS}:_compute_slot_mappings_kernel")
def _compute_slot_mappings(
    grid0, grid1, max_num_tokens, idx_mapping, query_start_loc, pos, block_table_ptrs,
    block_table_strides, block_sizes, slot_mapping_enabled, dcp_sharded, slot_mappings_ptr,
    slot_mappings_stride, cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_ID, TRITON_BLOCK_SIZE,
):  # fmt: skip
    assert CP_SIZE == 1  # vLLM's attention for CPUs has no context parallelism
    num_reqs = grid1 - 1
    for group in range(grid0):
        out = group * slot_mappings_stride
        size, stride = block_sizes[group], block_table_strides[group]
        for j in range(query_start_loc[num_reqs], max_num_tokens):
            slot_mappings_ptr[out + j] = PAD_ID
        for i in range(num_reqs):
            slot = idx_mapping[i]
            start, end = query_start_loc[i], query_start_loc[i + 1]
            # -1 marks a request that owns no blocks.
            if slot < 0 or not slot_mapping_enabled[group]:
                for j in range(start, end):
                    slot_mappings_ptr[out + j] = PAD_ID
                continue
            row = int32_at(block_table_ptrs[group], (slot + 1) * stride)[slot * stride :]
            for j in range(start, end):
                slot_mappings_ptr[out + j] = row[pos[j] // size] * size + pos[j] % size
