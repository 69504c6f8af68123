# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that shape logits, draw from them and report on them."""

from __future__ import annotations

import torch

from tests.cpu.replacement_cases import REQS, SLOTS, STEPS, VOCAB, Draw, Launch, case, expanded

_SAMPLE = "vllm.v1.worker.gpu.sample"
_LOGPROB = f"{_SAMPLE}.logprob"
LENGTH = 64


def _rows(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The first row of each request, and the slot and the position in its request of every row."""
    starts = draw.starts(STEPS + 1, 1)
    slots, positions = expanded(starts, draw.slots())
    return starts, slots, positions, len(slots)


@case(f"{_SAMPLE}.gumbel:_temperature_kernel")
def temperature(draw: Draw) -> Launch:
    _, slots, _, rows = _rows(draw)
    return Launch((rows, 3), logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots)


@case(f"{_SAMPLE}.gumbel:_gumbel_sample_kernel")
def gumbel(draw: Draw) -> Launch:
    _, slots, _, rows = _rows(draw)
    if draw.hostile:
        slots[1] = -1
    return Launch(
        (rows, 3), local_argmax_ptr=draw.longs(-9, 0, rows, 3),
        local_max_ptr=draw.floats(rows, 3),
        logits_cache_ptr=None, logits_cache_stride_0=0, logits_cache_stride_1=0,
        logits_cache_col_ptr=None, logits_cache_source_ptr=None, logits_cache_source_stride=0,
        logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots,
        pos_ptr=draw.longs(0, 4000, rows), IS_DRAFTING=False,
        APPLY_TEMPERATURE=False, USE_FP64=False, PER_TOKEN_COL=False,
    )  # fmt: skip


@case(f"{_SAMPLE}.min_p:_min_p_kernel")
def min_p(draw: Draw) -> Launch:
    _, slots, _, rows = _rows(draw)
    return Launch(
        (rows,), logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots,
        min_p_ptr=draw.ints(0, 5, SLOTS) / 17,
    )  # fmt: skip


@case(f"{_SAMPLE}.penalties:_penalties_kernel")
def penalties(draw: Draw) -> Launch:
    _, slots, positions, rows = _rows(draw)
    tokens = draw.ints(0, VOCAB, rows)
    if draw.hostile:
        tokens[1::3] = -1
    return Launch(
        (rows, 3), logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots,
        token_ids_ptr=tokens, expanded_local_pos_ptr=positions,
        repetition_penalty_ptr=1 + draw.ints(0, 3, SLOTS) / 7,
        frequency_penalty_ptr=draw.ints(-1, 2, SLOTS) / 3,
        presence_penalty_ptr=draw.ints(-1, 2, SLOTS) / 9,
        prompt_bin_mask_ptr=draw.rows(draw.ints(-(2**31), 2**31, SLOTS, -(-VOCAB // 32))),
        output_bin_counts_ptr=draw.rows((draw.ints(0, 9, SLOTS, VOCAB) - 6).clamp(min=0)),
    )  # fmt: skip


@case(f"{_SAMPLE}.penalties:_bincount_kernel")
def bincount(draw: Draw) -> Launch:
    prompts = draw.ints(1, 30, SLOTS)
    return Launch(
        (REQS, 4), expanded_idx_mapping_ptr=draw.slots(),
        all_token_ids_ptr=draw.rows(draw.ints(0, VOCAB, SLOTS, LENGTH)), prompt_len_ptr=prompts,
        prefill_len_ptr=prompts + draw.ints(0, 30, SLOTS),
        prompt_bin_mask_ptr=draw.rows(torch.zeros(SLOTS, -(-VOCAB // 32), dtype=torch.int32)),
        output_bin_counts_ptr=draw.rows(torch.zeros(SLOTS, VOCAB, dtype=torch.int32)),
        BLOCK_SIZE=16,
    )  # fmt: skip


@case(f"{_SAMPLE}.bad_words:_bad_words_kernel")
def bad_words(draw: Draw) -> Launch:
    _, slots, positions, rows = _rows(draw)
    few = 3  # so few tokens that bad words match
    words, ends = 4, draw.ints(1, 4, SLOTS, 4).cumsum(1).int()
    drafts = draw.ints(0, few, rows)
    if draw.hostile:
        drafts[1::4] = -1
    prompts = draw.ints(1, 30, SLOTS)
    return Launch(
        (rows, words), logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots,
        bad_word_token_ids_ptr=draw.rows(draw.ints(0, few, SLOTS, 16)),
        bad_word_offsets_ptr=torch.cat([torch.zeros_like(ends[:, :1]), ends], 1),
        num_bad_words_ptr=draw.ints(0, words + 1, SLOTS),
        all_token_ids_ptr=draw.rows(draw.ints(0, few, SLOTS, LENGTH)), prompt_len_ptr=prompts,
        total_len_ptr=prompts + draw.ints(0, 30, SLOTS), input_ids_ptr=drafts,
        expanded_local_pos_ptr=positions,
    )  # fmt: skip


@case(f"{_SAMPLE}.logit_bias:_bias_kernel", check=False)
@case(f"{_SAMPLE}.logit_bias:_bias_kernel/all_masked", check=True)
def bias(draw: Draw, check: bool) -> Launch:
    _, slots, _, rows = _rows(draw)
    logits = draw.logits(rows)
    if check:  # rows where only stop tokens are allowed
        logits[::2] = -torch.inf
        logits[::2, :40:3] = 1.5
    width = 6
    tokens = [
        draw.rows(draw.ints(0, VOCAB, SLOTS, 1) + 7 * torch.arange(width, dtype=torch.int32))
        for _ in range(3)
    ]
    allowed, biased, stop = (t % 40 if check else t % VOCAB for t in tokens)
    numbers = [draw.ints(-2, width + 1, SLOTS).clamp(min=0) for _ in range(3)]
    return Launch(
        (rows,), logits_ptr=logits, expanded_idx_mapping_ptr=slots,
        num_allowed_token_ids_ptr=numbers[0], allowed_token_ids_ptr=allowed,
        num_logit_bias_ptr=numbers[1], bias_token_ids_ptr=biased,
        bias_ptr=draw.floats(SLOTS, width), pos_ptr=draw.longs(0, 20, rows),
        min_lens_ptr=draw.ints(0, 30, SLOTS), num_stop_token_ids_ptr=numbers[2],
        restore_when_all_masked_ptr=draw.ints(0, 3, SLOTS) > 0, stop_token_ids_ptr=stop,
        BLOCK_SIZE=8, LOGITS_BLOCK_SIZE=256, CHECK_ALL_MASKED_ROWS=check,
    )  # fmt: skip


@case("vllm.v1.worker.gpu.structured_outputs:_apply_grammar_bitmask_kernel")
def grammar_bitmask(draw: Draw) -> Launch:
    starts, _, _, rows = _rows(draw)
    masks = 8
    positions = draw.ints(0, REQS, masks) * (STEPS + 3) + torch.arange(masks) % (STEPS + 3)
    return Launch(
        (masks, 3), logits_ptr=draw.logits(rows), logits_indices_ptr=positions.to(torch.int32),
        cu_num_logits_ptr=starts,
        bitmask_ptr=draw.rows(draw.ints(-(2**31), 2**31, masks, -(-VOCAB // 32))),
        MASK_STRIDE=STEPS + 3,
    )  # fmt: skip


_THINKING = f"{_SAMPLE}.thinking_budget"


def _thinking(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs over a small vocabulary, their lengths, and thinking budgets."""
    tokens = draw.rows(draw.ints(0, 3, SLOTS, LENGTH))
    return tokens, draw.ints(0, LENGTH - 8, SLOTS), draw.ints(-1, 9, SLOTS)


@case(f"{_THINKING}:_update_committed_marker_cache_kernel")
def marker_cache(draw: Draw) -> Launch:
    tokens, totals, budgets = _thinking(draw)
    cold = draw.ints(0, 2, SLOTS) == 0
    last_start, last_end = (draw.ints(-1, 20, SLOTS).masked_fill(cold, -1) for _ in range(2))
    return Launch(
        (REQS,), req_ids_ptr=draw.slots(), thinking_token_budget_ptr=budgets,
        all_token_ids_ptr=tokens, total_len_ptr=totals, cached_last_start_ptr=last_start,
        cached_last_end_ptr=last_end,
        cached_scan_pos_ptr=draw.ints(0, 50, SLOTS).masked_fill(cold, 0),
        reasoning_start_token_ids_ptr=torch.tensor([1, 2, 0], dtype=torch.int32),
        natural_reasoning_end_token_ids_ptr=torch.tensor([2, 2], dtype=torch.int32), START_LEN=3,
        NATURAL_END_LEN=2, MAX_LEN=3, BLOCK=8,
    )  # fmt: skip


@case(f"{_THINKING}:_thinking_budget_kernel")
def thinking_budget(draw: Draw) -> Launch:
    tokens, totals, budgets = _thinking(draw)
    _, slots, positions, rows = _rows(draw)
    drafts = draw.ints(0, 3, rows)
    if draw.hostile:
        drafts[1::4] = -1
    return Launch(
        (rows,), logits_ptr=draw.logits(rows), expanded_idx_mapping_ptr=slots,
        thinking_token_budget_ptr=budgets, all_token_ids_ptr=tokens, total_len_ptr=totals,
        input_ids_ptr=drafts, expanded_local_pos_ptr=positions,
        cached_last_start_ptr=draw.ints(-1, 20, SLOTS),
        cached_last_end_ptr=draw.ints(-1, 12, SLOTS),
        reasoning_start_token_ids_ptr=torch.tensor([1, 2], dtype=torch.int32),
        natural_reasoning_end_token_ids_ptr=torch.tensor([2, 2, 1], dtype=torch.int32),
        reasoning_end_token_ids_ptr=torch.tensor([2, 0, 1], dtype=torch.int32), START_LEN=2,
        NATURAL_END_LEN=3, END_LEN=3,
    )  # fmt: skip


@case(f"{_LOGPROB}:_topk_log_softmax_kernel")
def topk_log_softmax(draw: Draw) -> Launch:
    rows, top_k = 6, 5
    return Launch(
        (rows,), output_ptr=draw.floats(rows, top_k), logits_ptr=draw.logits(rows),
        topk_ids_ptr=draw.rows(draw.longs(0, VOCAB, rows, top_k)), topk=top_k, TOPK_BLOCK_SIZE=4,
    )  # fmt: skip


@case(f"{_LOGPROB}:_ranks_kernel")
def ranks(draw: Draw) -> Launch:
    rows = 6
    return Launch(
        (rows,), output_ptr=draw.longs(-9, 0, rows), logits_ptr=draw.logits(rows),
        token_ids_ptr=draw.longs(0, VOCAB, rows),
    )  # fmt: skip


@case(f"{_LOGPROB}:_fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(draw: Draw) -> Launch:
    rows, columns, top_k = 6, 7, 3
    return Launch(
        (rows,), out_token_ids_ptr=draw.longs(-9, 0, rows, 1 + columns),
        out_valid_mask_ptr=torch.zeros(rows, 1 + columns, dtype=torch.bool),
        sampled_token_ids_ptr=draw.longs(0, VOCAB, rows),
        topk_indices_ptr=draw.ints(0, VOCAB, rows, top_k),
        expanded_idx_mapping_ptr=draw.ints(0, SLOTS, rows),
        num_per_req_token_ids_ptr=draw.ints(-4, columns + 1, SLOTS).clamp(min=0),
        per_req_token_ids_ptr=draw.rows(draw.ints(0, VOCAB, SLOTS, columns)), NUM_TOPK=top_k,
        PADDED_COLS=8,
    )  # fmt: skip


@case(f"{_SAMPLE}.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(draw: Draw) -> Launch:
    starts = draw.starts(7)
    return Launch(
        (REQS,), prompt_logprobs_token_ids_ptr=draw.longs(-9, 0, int(starts[-1]) + 2),
        query_start_loc_ptr=starts, num_computed_tokens_ptr=draw.ints(0, 50, SLOTS),
        all_token_ids_ptr=draw.rows(draw.ints(0, VOCAB, SLOTS, 64)), BLOCK_SIZE=4,
    )  # fmt: skip


@case("vllm.v1.worker.gpu.metrics.logits:_num_nans_kernel")
def num_nans(draw: Draw) -> Launch:
    logits = draw.logits(REQS)
    logits[draw.floats(*logits.shape) < -1] = torch.nan
    return Launch((REQS,), logits_ptr=logits, num_nans_ptr=draw.ints(-9, 0, REQS))
