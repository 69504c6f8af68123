# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that report on logits."""

from __future__ import annotations

import torch

from tests.cpu.twin_cases import REQS, SLOTS, VOCAB, Draw, Launch, case

_SAMPLE = "vllm.v1.worker.gpu.sample"
_LOGPROB = f"{_SAMPLE}.logprob"


@case(f"{_LOGPROB}:_topk_log_softmax_kernel")
def topk_log_softmax(draw: Draw) -> Launch:
    rows, top_k = 6, 5
    logits = draw.logits(rows)
    tokens = draw.rows(draw.ints(0, VOCAB, rows, top_k, dtype=torch.int64))
    args = {
        "output_ptr": draw.floats(rows, top_k), "logits_ptr": logits, "topk_ids_ptr": tokens,
        "topk": top_k, "vocab_size": VOCAB, "BLOCK_SIZE": 256, "TOPK_BLOCK_SIZE": 4,
    }  # fmt: skip
    return Launch((rows,), args)


@case(f"{_LOGPROB}:_ranks_kernel")
def ranks(draw: Draw) -> Launch:
    rows = 6
    logits = draw.logits(rows)
    args = {
        "output_ptr": draw.ints(-9, 0, rows, dtype=torch.int64),
        "logits_ptr": logits,
        "token_ids_ptr": draw.ints(0, VOCAB, rows, dtype=torch.int64),
        "vocab_size": VOCAB,
        "BLOCK_SIZE": 256,
    }
    return Launch((rows,), args)


@case(f"{_LOGPROB}:_fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(draw: Draw) -> Launch:
    rows, columns, top_k = 6, 7, 3
    custom = draw.rows(draw.ints(0, VOCAB, SLOTS, columns))
    args = {
        "out_token_ids_ptr": draw.ints(-9, 0, rows, 1 + columns, dtype=torch.int64),
        "out_valid_mask_ptr": torch.zeros(rows, 1 + columns, dtype=torch.bool),
        "sampled_token_ids_ptr": draw.ints(0, VOCAB, rows, dtype=torch.int64),
        "topk_indices_ptr": draw.ints(0, VOCAB, rows, top_k),
        "expanded_idx_mapping_ptr": draw.ints(0, SLOTS, rows),
        "num_per_req_token_ids_ptr": draw.ints(-4, columns + 1, SLOTS).clamp(min=0),
        "per_req_token_ids_ptr": custom,
        "NUM_TOPK": top_k,
        "PADDED_COLS": 8,
    }
    return Launch((rows,), args)


@case(f"{_SAMPLE}.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(draw: Draw) -> Launch:
    starts = draw.starts(7)
    tokens = draw.rows(draw.ints(0, VOCAB, SLOTS, 64))
    args = {
        "prompt_logprobs_token_ids_ptr": draw.ints(-9, 0, int(starts[-1]) + 2, dtype=torch.int64),
        "query_start_loc_ptr": starts,
        "idx_mapping_ptr": draw.slots(),
        "num_computed_tokens_ptr": draw.ints(0, 50, SLOTS),
        "all_token_ids_ptr": tokens,
        "BLOCK_SIZE": 4,
    }
    return Launch((REQS,), args)


@case("vllm.v1.worker.gpu.metrics.logits:_num_nans_kernel")
def num_nans(draw: Draw) -> Launch:
    logits = draw.logits(REQS)
    logits[draw.floats(*logits.shape) < -1] = torch.nan
    args = {
        "logits_ptr": logits,
        "num_nans_ptr": draw.ints(-9, 0, REQS),
        "vocab_size": VOCAB,
        "BLOCK_SIZE": 256,
    }
    return Launch((REQS,), args)
