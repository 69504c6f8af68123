# SPDX-License-Identifier: Apache-2.0
"""Replacements of temperature and of the Gumbel-max draw."""

from __future__ import annotations

import numpy as np

from vllm_bastion.cpu.noise import gumbel_row
from vllm_bastion.cpu.replacements.launch import replacement

_GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"


@replacement(f"{_GUMBEL}:_temperature_kernel")
def _temperature(
    grid0, logits_ptr, logits_stride, expanded_idx_mapping_ptr, temperature_ptr, vocab_size,
    BLOCK_SIZE,
):  # fmt: skip
    for i in range(grid0):
        temperature = temperature_ptr[expanded_idx_mapping_ptr[i]]
        if temperature != 0.0 and temperature != 1.0:
            for v in range(i * logits_stride, i * logits_stride + vocab_size):
                logits_ptr[v] = logits_ptr[v] / temperature


def block_argmax(row, vocab_size, block_size, num_blocks, out_value, out_token):
    """The largest value of every block, and its token; the first token if several are equal.

    row: [>= vocab_size]; out_value, out_token: [num_blocks].
    """
    whole = vocab_size // block_size
    blocks, begins = row[: whole * block_size].reshape(whole, block_size), np.arange(whole)
    if whole:
        best = blocks.argmax(1)
        out_value[:whole], out_token[:whole] = blocks[begins, best], begins * block_size + best
    if whole < num_blocks:
        begin = whole * block_size
        last = int(row[begin:vocab_size].argmax())
        out_value[whole], out_token[whole] = row[begin + last], begin + last


@replacement(f"{_GUMBEL}:_gumbel_sample_kernel", compile=False)
def _gumbel_sample(
    grid0, grid1, local_argmax_ptr, local_argmax_stride, local_max_ptr, local_max_stride,
    logits_cache_ptr, logits_cache_stride_0, logits_cache_stride_1, logits_cache_col_ptr,
    logits_cache_source_ptr, logits_cache_source_stride, logits_ptr, logits_stride,
    expanded_idx_mapping_ptr, seeds_ptr, pos_ptr, temp_ptr, vocab_size, BLOCK_SIZE, IS_DRAFTING,
    APPLY_TEMPERATURE, USE_FP64, PER_TOKEN_COL,
):  # fmt: skip
    # fp64 noise is refused on a CPU, and only other methods' drafters ask for the rest.
    assert not (USE_FP64 or IS_DRAFTING or APPLY_TEMPERATURE)
    for i in range(grid0):
        slot = int(expanded_idx_mapping_ptr[i])
        row = logits_ptr[i * logits_stride :][:vocab_size]
        temperature = np.float32(0.0) if slot < 0 else temp_ptr[slot]
        if temperature != 0.0:
            row = row + gumbel_row(seeds_ptr[slot], int(pos_ptr[i]), vocab_size)
        block_argmax(
            row,
            vocab_size,
            BLOCK_SIZE,
            grid1,
            local_max_ptr[i * local_max_stride :],
            local_argmax_ptr[i * local_argmax_stride :],
        )
