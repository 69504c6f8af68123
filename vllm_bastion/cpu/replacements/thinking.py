# SPDX-License-Identifier: Apache-2.0
"""Replacements of the kernels that end a request's reasoning once its token budget is spent."""

from __future__ import annotations

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.replacements.launch import replacement, row_of

_THINKING = "vllm.v1.worker.gpu.sample.thinking_budget"


@njit
def _last_match(tokens, low, high, marker):
    """The last position in [low, high) at which a whole marker begins; -1 if there is none."""
    length = len(marker)
    for at in range(min(high, len(tokens) - length + 1) - 1, low - 1, -1):
        same = 0
        while same < length and tokens[at + same] == marker[same]:
            same += 1
        if same == length:
            return at
    return -1


@replacement(f"{_THINKING}:_update_committed_marker_cache_kernel")
def _update_committed_marker_cache(
    grid0, req_ids_ptr, thinking_token_budget_ptr, all_token_ids_ptr, all_token_ids_stride,
    total_len_ptr, cached_last_start_ptr, cached_last_end_ptr, cached_scan_pos_ptr,
    reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr, START_LEN, NATURAL_END_LEN,
    MAX_LEN, BLOCK,
):  # fmt: skip
    start_marker = reasoning_start_token_ids_ptr[:START_LEN]
    end_marker = natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN]
    for i in range(grid0):
        slot = req_ids_ptr[i]
        if thinking_token_budget_ptr[slot] < 0:
            continue
        total, scanned = total_len_ptr[slot], cached_scan_pos_ptr[slot]
        start, end = cached_last_start_ptr[slot], cached_last_end_ptr[slot]
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)
        if scanned > total:
            scanned, start, end = 0, -1, -1
        # The first scan goes back block by block until it finds a marker.
        low = high = total
        if scanned == 0 and start < 0 and end < 0:
            low = max(high - BLOCK, 0)
        else:
            low = scanned
        while high > 0 and low < high:
            new_start = _last_match(tokens[:total], low, high, start_marker)
            new_end = _last_match(tokens[:total], low, high, end_marker)
            start = new_start if new_start >= 0 else start
            end = new_end if new_end >= 0 else end
            if start >= 0 or end >= 0 or scanned > 0:
                break
            high = low
            low = max(high - BLOCK, 0)
        cached_last_start_ptr[slot] = start
        cached_last_end_ptr[slot] = end
        cached_scan_pos_ptr[slot] = max(total - (MAX_LEN - 1), 0)


@njit
def _effective_match(tokens, drafts, begin, marker):
    """Whether a marker begins at `begin` of the output `tokens` followed by this step's drafts.

    drafts: the step's rows of the request; the first one is the output's last token.
    """
    for j in range(len(marker)):
        behind = begin + j - len(tokens)
        token = tokens[begin + j] if behind < 0 else drafts[behind + 1]
        if token != marker[j]:
            return False
    return True


@replacement(f"{_THINKING}:_thinking_budget_kernel")
def _thinking_budget(
    grid0, logits_ptr, logits_stride, expanded_idx_mapping_ptr, thinking_token_budget_ptr,
    all_token_ids_ptr, all_token_ids_stride, total_len_ptr, input_ids_ptr, expanded_local_pos_ptr,
    cached_last_start_ptr, cached_last_end_ptr, reasoning_start_token_ids_ptr,
    natural_reasoning_end_token_ids_ptr, reasoning_end_token_ids_ptr, START_LEN, NATURAL_END_LEN,
    END_LEN,
):  # fmt: skip
    start_marker = reasoning_start_token_ids_ptr[:START_LEN]
    end_marker = natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN]
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        budget = thinking_token_budget_ptr[slot]
        if budget < 0:
            continue
        local_pos = expanded_local_pos_ptr[i]
        first = i - local_pos
        total = total_len_ptr[slot]
        length = total + local_pos
        tokens = row_of(all_token_ids_ptr, all_token_ids_stride, slot)[:total]
        drafts = input_ids_ptr[first:]
        start, end = cached_last_start_ptr[slot], cached_last_end_ptr[slot]
        for at in range(max(total - START_LEN + 1, 0), length - START_LEN + 1):
            if _effective_match(tokens, drafts, at, start_marker):
                start = at
        for at in range(max(total - NATURAL_END_LEN + 1, 0), length - NATURAL_END_LEN + 1):
            if _effective_match(tokens, drafts, at, end_marker):
                end = at
        if start < 0 or start <= end or length - start - START_LEN < budget:
            continue
        # Continue an end marker that is partly written.
        begun = 0
        for prefix in range(1, min(END_LEN - 1, length) + 1):
            marker = reasoning_end_token_ids_ptr[:prefix]
            if _effective_match(tokens, drafts, length - prefix, marker):
                begun = prefix
        row = row_of(logits_ptr, logits_stride, i)
        row[reasoning_end_token_ids_ptr[begun]] = 1.0e9
