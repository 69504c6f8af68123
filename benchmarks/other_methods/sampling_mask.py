# SPDX-License-Identifier: Apache-2.0
"""Twin of the kernel behind `return_sampling_mask`: which tokens a draw could choose."""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.twins.launch import twin


@twin("vllm.v1.worker.gpu.sample.output:_compact_sampling_mask_kernel", compile=False)
def _compact_sampling_mask(
    grid0,
    logits_ptr,
    logits_row_stride,
    logits_col_stride,
    cu_num_logits_ptr,
    num_sampled_tokens_ptr,
    token_ids_ptr,
    token_ids_row_stride,
    packed_mask_ptr,
    packed_mask_row_stride,
    counts_ptr,
    vocab_size,
    max_num_kept,
    ROWS_PER_REQUEST,
    BLOCK_SIZE,
):
    for i in range(grid0):
        request, nth = divmod(i, ROWS_PER_REQUEST)
        if nth >= num_sampled_tokens_ptr[request]:
            counts_ptr[i] = 0
            continue
        begin = (int(cu_num_logits_ptr[request]) + nth) * logits_row_stride
        keep = np.isfinite(logits_ptr[begin::logits_col_stride][:vocab_size])
        kept = np.flatnonzero(keep)
        counts_ptr[i] = len(kept)
        shown = kept[:max_num_kept]
        token_ids_ptr[i * token_ids_row_stride :][: len(shown)] = shown
        bits = np.packbits(keep, bitorder="little")
        packed_mask_ptr[i * packed_mask_row_stride :][: len(bits)] = bits
