# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that move recurrent states between blocks."""

from __future__ import annotations

from typing import Any

import torch

from tests.cpu.twin_cases import REQS, SLOTS, Draw, Launch, addresses, case

_MAMBA = "vllm.v1.worker.mamba_utils"


@case(f"{_MAMBA}:preprocess_mamba_align_fused_kernel")
def preprocess_mamba_align(draw: Draw) -> Launch:
    args = {
        "idx_mapping_ptr": draw.slots(), "state_idx_ptr": draw.ints(-1, 4, SLOTS),
        "num_computed_tokens_ptr": draw.ints(0, 30, SLOTS), "query_start_loc_ptr": draw.starts(9),
        "num_accepted_tokens_ptr": draw.ints(0, 5, SLOTS), "src_col_ptr": draw.ints(-9, 0, SLOTS),
        "src_off_ptr": draw.ints(-9, 0, SLOTS), "num_reqs": REQS, "BLOCK_SIZE": 8,
        "MAMBA_BLOCK_SIZE": 8,
    }  # fmt: skip
    return Launch((1,), args)


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
    args |= {
        "mamba_state_idx_ptr": draw.ints(0, 5, SLOTS),
        "src_col_ptr": draw.ints(-1, 5, SLOTS),
        "token_bias_ptr": draw.ints(0, 4, SLOTS),
        "idx_mapping_ptr": draw.slots(negative=True),
        "num_reqs": REQS,
    }
    return Launch((REQS, 3, 2), args, behind)


@case(f"{_MAMBA}:postprocess_mamba_fused_kernel", dim_first=False)
@case(f"{_MAMBA}:postprocess_mamba_fused_kernel/dim_first", dim_first=True)
def postprocess_mamba(draw: Draw, dim_first: bool) -> Launch:
    args, behind = _states(draw, dim_first)
    accepted = draw.ints(1, 5, SLOTS)
    computed = draw.ints(9, 40, SLOTS)
    args |= {
        "num_accepted_tokens_ptr": accepted, "mamba_state_idx_ptr": (computed - 1) // 8,
        "num_scheduled_tokens_ptr": None, "num_computed_tokens_ptr": computed,
        "num_draft_tokens_ptr": None, "num_accepted_tokens_out_ptr": accepted.clone(),
        "idx_mapping_ptr": draw.slots(negative=True), "num_reqs": REQS, "block_size": 8,
        "PRECOMPUTED_NEW_COMPUTED": True,
    }  # fmt: skip
    return Launch((REQS, 3, 2), args, behind)
