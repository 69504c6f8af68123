# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that prepare batches, block tables, states and drafters' inputs."""

from __future__ import annotations

from typing import Any

import torch

from tests.cpu.replacement_cases import REQS, SLOTS, STEPS, Draw, Launch, addresses, case

_GPU = "vllm.v1.worker.gpu"
_BATCH = f"{_GPU}.input_batch"
_DFLASH = f"{_GPU}.spec_decode.dflash.speculator:_prepare_dflash_inputs_kernel"
_MAMBA = "vllm.v1.worker.mamba_utils"
LENGTH = 64  # the most tokens of a request


def _writes(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = draw.starts(7)
    cu_lens = starts[1:]
    contents = draw.ints(1, 900, int(starts[-1]))
    return draw.slots(), draw.ints(0, 20, REQS), contents, cu_lens


@case(f"{_GPU}.buffer_utils:_apply_write_kernel")
def apply_write(draw: Draw) -> Launch:
    rows, begins, contents, cu_lens = _writes(draw)
    return Launch(
        (REQS, 2), output_ptr=draw.rows(draw.ints(-9, 0, SLOTS, 32)), write_indices_ptr=rows,
        write_starts_ptr=begins, write_contents_ptr=contents, write_cu_lens_ptr=cu_lens,
        write_group_ids_ptr=None, BLOCK_SIZE=4, MULTI_GROUP=False,
    )  # fmt: skip


@case(f"{_GPU}.buffer_utils:_apply_write_kernel/groups")
def apply_write_groups(draw: Draw) -> Launch:
    rows, begins, contents, cu_lens = _writes(draw)
    tables = [draw.ints(-9, 0, SLOTS, width) for width in (32, 40)]
    return Launch(
        (REQS, 2), *tables, output_ptr=addresses(tables), output_stride=torch.tensor([32, 40]),
        write_indices_ptr=rows, write_starts_ptr=begins, write_contents_ptr=contents,
        write_cu_lens_ptr=cu_lens, write_group_ids_ptr=draw.ints(0, 2, REQS), BLOCK_SIZE=4,
        MULTI_GROUP=True,
    )  # fmt: skip


@case(f"{_BATCH}:_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(draw: Draw) -> Launch:
    starts = draw.starts(7)
    lookahead = 2
    return Launch(
        (REQS,), input_ids_ptr=draw.ints(-9, 0, int(starts[-1]) + 5),
        next_prefill_tokens_ptr=draw.ints(-9, 0, lookahead, SLOTS), num_lookahead=lookahead,
        query_start_loc_ptr=starts, all_token_ids_ptr=draw.rows(draw.ints(0, 900, SLOTS, LENGTH)),
        prefill_lens_ptr=draw.ints(8, 32, SLOTS), num_computed_tokens_ptr=draw.ints(0, 32, SLOTS),
        BLOCK_SIZE=4, LOOKAHEAD_BLOCK=2,
    )  # fmt: skip


@case(f"{_BATCH}:_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(draw: Draw) -> Launch:
    starts = draw.starts(7)
    return Launch(
        (REQS + 1,), pos_ptr=draw.longs(-9, 0, int(starts[-1]) + 5),
        seq_lens_ptr=draw.ints(-9, 0, SLOTS), query_start_loc_ptr=starts,
        num_computed_tokens_ptr=draw.ints(0, 40, SLOTS), max_num_reqs=SLOTS, BLOCK_SIZE=4,
    )  # fmt: skip


@case(f"{_BATCH}:_combine_sampled_and_draft_tokens_kernel")
def combine(draw: Draw) -> Launch:
    logits, queries = draw.starts(STEPS + 1, 1), draw.starts(3)
    queries = queries + logits  # a chunk of the prompt before some rows
    return Launch(
        (REQS,), input_ids_ptr=draw.ints(-9, 0, int(queries[-1]) + 5),
        last_sampled_tokens_ptr=draw.longs(0, 900, SLOTS), query_start_loc_ptr=queries,
        seq_lens_ptr=draw.ints(8, 24, REQS), prefill_len_ptr=draw.ints(6, 20, SLOTS),
        draft_tokens_ptr=draw.rows(draw.ints(0, 900, SLOTS, STEPS)), cu_num_logits_ptr=logits,
        logits_indices_ptr=draw.longs(-9, 0, int(logits[-1]) + 2), BLOCK_SIZE=8,
        NUM_NEW_SAMPLED_TOKENS=1,
    )  # fmt: skip


@case(f"{_BATCH}:_combine_sampled_and_draft_tokens_kernel/no_bonus")
def combine_without_bonus(draw: Draw) -> Launch:
    launch = combine(draw)
    launch.args["NUM_NEW_SAMPLED_TOKENS"] = 0
    launch.args["draft_tokens_ptr"] = draw.ints(0, 900, SLOTS, STEPS + 1)
    launch.args["draft_tokens_stride"] = STEPS + 1
    return launch


@case(f"{_BATCH}:_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(draw: Draw) -> Launch:
    return Launch(
        (REQS,), num_sampled_ptr=draw.ints(0, STEPS, REQS), num_rejected_ptr=draw.ints(-9, 0, REQS),
        seq_lens_ptr=draw.ints(4, 12, REQS), cu_num_logits_ptr=draw.starts(STEPS + 1),
        prefill_len_ptr=draw.ints(4, 12, SLOTS),
    )  # fmt: skip


@case(f"{_BATCH}:_post_update_kernel")
def post_update(draw: Draw) -> Launch:
    return Launch(
        (REQS,), idx_mapping_ptr=draw.slots(negative=True),
        num_computed_tokens_ptr=draw.ints(0, 40, SLOTS),
        last_sampled_tokens_ptr=draw.longs(0, 900, SLOTS),
        output_bin_counts_ptr=draw.rows(draw.ints(0, 3, SLOTS, 900)),
        sampled_tokens_ptr=draw.rows(draw.longs(0, 900, REQS, STEPS + 1)),
        num_sampled_ptr=draw.ints(0, STEPS + 2, REQS), num_rejected_ptr=draw.ints(0, STEPS, REQS),
        query_start_loc_ptr=draw.starts(7),
        all_token_ids_ptr=draw.rows(draw.ints(0, 900, SLOTS, LENGTH)),
        total_len_ptr=draw.ints(0, LENGTH - STEPS - 1, SLOTS), draft_tokens_ptr=None,
        draft_tokens_out_ptr=None, num_draft_tokens=0,
    )  # fmt: skip


@case(f"{_BATCH}:_post_update_kernel/drafts")
def post_update_with_drafts(draw: Draw) -> Launch:
    launch = post_update(draw)
    launch.args |= {
        "draft_tokens_ptr": draw.longs(0, 900, REQS, STEPS),
        "draft_tokens_out_ptr": draw.longs(-9, 0, SLOTS, STEPS),
        "num_draft_tokens": STEPS,
    }
    return launch


@case(f"{_BATCH}:_post_update_kernel/without_counts_and_queries")
def post_update_bare(draw: Draw) -> Launch:
    launch = post_update(draw)
    launch.args |= {
        "output_bin_counts_ptr": None,
        "output_bin_counts_stride": 0,
        "query_start_loc_ptr": None,
    }
    return launch


@case(f"{_BATCH}:_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(draw: Draw) -> Launch:
    return Launch(
        (REQS,), num_computed_tokens_ptr=draw.ints(0, 40, SLOTS),
        query_start_loc_ptr=draw.starts(7),
    )  # fmt: skip


@case(f"{_BATCH}:_expand_idx_mapping_kernel")
def expand_idx_mapping(draw: Draw) -> Launch:
    starts = draw.starts(STEPS + 1)
    return Launch(
        (REQS,), idx_mapping_ptr=draw.slots(negative=True),
        expanded_idx_mapping_ptr=draw.ints(-9, 0, int(starts[-1]) + 2),
        expanded_local_pos_ptr=draw.ints(-9, 0, int(starts[-1]) + 2), cu_num_logits_ptr=starts,
        BLOCK_SIZE=8,
    )  # fmt: skip


@case(f"{_GPU}.block_table:_gather_block_tables_kernel", masked=False)
@case(f"{_GPU}.block_table:_gather_block_tables_kernel/sliding_window", masked=True)
def gather_block_tables(draw: Draw, masked: bool) -> Launch:
    widths = [6, 11]
    sources = [draw.ints(0, 90, SLOTS, width) for width in widths]
    targets = [draw.ints(-9, 0, SLOTS, width) for width in widths]
    return Launch(
        (2, REQS + 2), *(sources + targets), batch_idx_to_req_idx=draw.slots(),
        src_block_table_ptrs=addresses(sources), dst_block_table_ptrs=addresses(targets),
        block_table_strides=torch.tensor(widths), num_blocks_ptr=draw.ints(0, 7, 2, SLOTS),
        num_computed_tokens_ptr=draw.ints(0, 24, SLOTS),
        sliding_window_reach_ptr=torch.tensor([5, 0] if draw.hostile else [5, 9]).int(),
        block_sizes_ptr=torch.tensor([4, 2], dtype=torch.int32), MASK_SLIDING_WINDOW=masked,
        BLOCK_SIZE=4,
    )  # fmt: skip


@case(f"{_GPU}.block_table:_compute_slot_mappings_kernel")
def compute_slot_mappings(draw: Draw) -> Launch:
    widths, sizes, starts = [16, 8], [4, 8], draw.starts(7)
    tables = [draw.ints(0, 90, SLOTS, width) for width in widths]
    tokens = int(starts[-1]) + 6
    return Launch(
        (2, REQS + 1), *tables, max_num_tokens=tokens, idx_mapping=draw.slots(negative=True),
        query_start_loc=starts, pos=draw.longs(0, 64, tokens), block_table_ptrs=addresses(tables),
        block_table_strides=torch.tensor(widths),
        block_sizes=torch.tensor(sizes, dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True, not draw.hostile]),
        dcp_sharded=torch.tensor([True, False]), slot_mappings_ptr=draw.longs(-9, 0, 2, tokens),
        cp_rank=0, CP_SIZE=1, CP_INTERLEAVE=1,
        PAD_ID=-1, TRITON_BLOCK_SIZE=4,
    )  # fmt: skip


@case(_DFLASH, from_anchor=False)
@case(f"{_DFLASH}/from_anchor", from_anchor=True)
def prepare_dflash_inputs(draw: Draw, from_anchor: bool) -> Launch:
    starts = draw.starts(9, 1)
    lengths = starts.diff()
    tokens, queries, most = int(starts[-1]), STEPS + 1 - from_anchor, SLOTS * (STEPS + 1) + 3
    # Some contexts reach past the table and past the longest model length.
    first = draw.longs(0, 50 if draw.hostile else 30, REQS)
    positions = [start + torch.arange(int(n)) for start, n in zip(first, lengths)]
    return Launch(
        (REQS, 2), out_input_ids_ptr=draw.ints(-9, 0, most),
        out_query_positions_ptr=draw.longs(-9, 0, most),
        out_is_padding_ptr=draw.ints(0, 2, most, dtype=torch.bool),
        out_query_start_loc_ptr=draw.ints(-9, 0, SLOTS + 1),
        out_seq_lens_ptr=draw.ints(-9, 0, SLOTS),
        out_query_slot_mapping_ptr=draw.longs(-9, 0, most),
        out_context_positions_ptr=draw.longs(-9, 0, tokens + 4),
        out_context_slot_mapping_ptr=draw.longs(-9, 0, tokens + 4),
        out_sample_indices_ptr=draw.longs(-9, 0, SLOTS * STEPS),
        out_sample_pos_ptr=draw.longs(-9, 0, SLOTS * STEPS),
        out_sample_idx_mapping_ptr=draw.ints(-9, 0, SLOTS * STEPS),
        out_temperature_ptr=draw.floats(SLOTS), out_seeds_ptr=draw.seeds(),
        target_positions_ptr=torch.cat(positions), target_query_start_loc_ptr=starts,
        last_sampled_ptr=draw.longs(0, 900, SLOTS),
        next_prefill_tokens_ptr=draw.ints(0, 900, SLOTS), num_sampled_ptr=draw.ints(0, 2, REQS),
        num_rejected_ptr=(draw.ints(0, 9, REQS) % lengths).to(torch.int32),
        block_table_ptr=draw.rows(draw.ints(0, 9, REQS, 12)), parallel_drafting_token_id=77,
        block_size=4, num_query_per_req=queries, num_speculative_steps=STEPS, max_num_reqs=SLOTS,
        max_num_tokens=most, max_model_len=48, cp_rank=0, SAMPLE_FROM_ANCHOR=from_anchor,
        PAD_SLOT_ID=-1, CP_SIZE=1, CP_INTERLEAVE=1, BLOCK_SIZE=8,
    )  # fmt: skip


@case(f"{_GPU}.model_states.mamba_hybrid:_scatter_num_accepted_kernel")
def scatter_num_accepted(draw: Draw) -> Launch:
    return Launch(
        (REQS,), idx_mapping_ptr=draw.slots(negative=True), num_sampled_ptr=draw.ints(0, 4, REQS),
        num_accepted_ptr=draw.ints(-9, 0, SLOTS),
    )  # fmt: skip


@case(f"{_GPU}.model_states.mamba_hybrid:_fill_num_accepted_kernel")
def fill_num_accepted(draw: Draw) -> Launch:
    return Launch(
        (REQS,), idx_mapping_ptr=draw.slots(negative=True),
        num_accepted_ptr=draw.ints(-9, 0, SLOTS), num_sampled=3,
    )  # fmt: skip


@case("vllm.v1.worker.utils:_zero_kv_blocks_kernel")
def zero_kv_blocks(draw: Draw) -> Launch:
    caches = [draw.ints(1, 90, 12, 20), draw.ints(1, 90, 12, 33)]
    return Launch(
        (4, 2, 3), *caches, seg_addrs_ptr=addresses(caches),
        seg_block_strides_ptr=torch.tensor([20, 33]), seg_page_sizes_ptr=torch.tensor([20, 24]),
        block_ids_ptr=draw.longs(0, 12, 4), BLOCK_SIZE=8,
    )  # fmt: skip


@case(f"{_GPU}.mm.rope:_prepare_rope_positions_kernel")
def prepare_rope_positions(draw: Draw) -> Launch:
    starts, dims = draw.starts(7), 3
    return Launch(
        (REQS,), positions_ptr=draw.longs(-9, 0, dims, 40),
        prefill_positions_ptr=draw.ints(0, 900, SLOTS * dims, LENGTH),
        prefill_positions_stride0=dims * LENGTH, prefill_positions_stride1=LENGTH,
        prefill_delta_ptr=draw.ints(-5, 6, SLOTS), query_start_loc_ptr=starts,
        prefill_lens_ptr=draw.ints(8, 32, SLOTS), num_computed_tokens_ptr=draw.ints(0, 40, SLOTS),
        BLOCK_SIZE=4, NUM_DIMS=dims,
    )  # fmt: skip


@case(f"{_MAMBA}:preprocess_mamba_align_fused_kernel")
def preprocess_mamba_align(draw: Draw) -> Launch:
    return Launch(
        (1,), state_idx_ptr=draw.ints(-1, 4, SLOTS),
        num_computed_tokens_ptr=draw.ints(0, 30, SLOTS), query_start_loc_ptr=draw.starts(9),
        num_accepted_tokens_ptr=draw.ints(0, 5, SLOTS), src_col_ptr=draw.ints(-9, 0, SLOTS),
        src_off_ptr=draw.ints(-9, 0, SLOTS), BLOCK_SIZE=8, MAMBA_BLOCK_SIZE=8,
    )  # fmt: skip


def _states(draw: Draw, dim_first: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Arguments that tell the states of two groups, and the states and block tables."""
    blocks, width, dims = SLOTS * 9 + 1, 6, 5
    conv = draw.floats(blocks, *((dims, width) if dim_first else (width, dims)))
    behind = [conv, draw.floats(blocks, 7), draw.floats(blocks, 4)]
    # distinct blocks, so that no two copies meet
    ids = torch.arange(1, blocks, dtype=torch.int32).view(SLOTS, 9)
    tables = [ids.clone(), ids.flip(0).clone()]
    args = {
        "block_table_ptrs_ptr": addresses(tables).to(torch.int64), "block_table_stride_req": 9,
        "state_base_addrs_ptr": addresses(behind).to(torch.int64),
        "state_block_strides_ptr": torch.tensor([4 * x.stride(0) for x in behind]),
        "state_elem_sizes_ptr": torch.tensor([4, 4, 4]).int(),
        "state_inner_sizes_ptr": torch.tensor([1 if dim_first else dims, 7, 4]),
        "state_conv_widths_ptr": torch.tensor([width, 0, 0]).int(),
        "state_group_indices_ptr": torch.tensor([0, 0, 1]).int(),
        "state_dim_row_count_ptr": torch.tensor([dims if dim_first else 0, 0, 0]).int(),
        "state_dim_row_stride_ptr": torch.tensor([4 * width if dim_first else 0, 0, 0]),
        "COPY_BLOCK_SIZE": 8, "CONV_STATE_DIM_FIRST": dim_first, "HAS_IDX_MAPPING": True,
        "TEMPORAL_TILES": 2,
    }  # fmt: skip
    return args, behind + tables


@case(f"{_MAMBA}:precopy_mamba_align_fused_kernel", dim_first=False)
@case(f"{_MAMBA}:precopy_mamba_align_fused_kernel/dim_first", dim_first=True)
def precopy_mamba_align(draw: Draw, dim_first: bool) -> Launch:
    args, behind = _states(draw, dim_first)
    return Launch(
        (REQS, 3, 2), *behind, mamba_state_idx_ptr=draw.ints(0, 5, SLOTS),
        src_col_ptr=draw.ints(-1, 5, SLOTS), token_bias_ptr=draw.ints(0, 4, SLOTS),
        idx_mapping_ptr=draw.slots(negative=True), **args,
    )  # fmt: skip


@case(f"{_MAMBA}:postprocess_mamba_fused_kernel", dim_first=False)
@case(f"{_MAMBA}:postprocess_mamba_fused_kernel/dim_first", dim_first=True)
def postprocess_mamba(draw: Draw, dim_first: bool) -> Launch:
    args, behind = _states(draw, dim_first)
    accepted = draw.ints(1, 5, SLOTS)
    computed = draw.ints(9, 40, SLOTS)
    return Launch(
        (REQS, 3, 2), *behind, num_accepted_tokens_ptr=accepted,
        mamba_state_idx_ptr=(computed - 1) // 8, num_scheduled_tokens_ptr=None,
        num_computed_tokens_ptr=computed, num_draft_tokens_ptr=None,
        num_accepted_tokens_out_ptr=accepted.clone(), idx_mapping_ptr=draw.slots(negative=True),
        block_size=8, PRECOMPUTED_NEW_COMPUTED=True, **args,
    )  # fmt: skip
