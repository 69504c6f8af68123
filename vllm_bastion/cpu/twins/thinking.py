# SPDX-License-Identifier: Apache-2.0
"""Twins of the kernels that end a request's reasoning once its token budget is spent."""

from __future__ import annotations

from bastion_kernels.cpu.cache import njit
from vllm_bastion.cpu.twins.launch import twin

_THINKING = "vllm.v1.worker.gpu.sample.thinking_budget"


@njit
def _last_match(tokens, low, high, total, marker, length):
    """The last position in [low, high) at which a marker of the first `total` tokens begins."""
    for at in range(min(high, total - length + 1) - 1, low - 1, -1):
        same = 0
        while same < length and tokens[at + same] == marker[same]:
            same += 1
        if same == length:
            return at
    return -1


@twin(f"{_THINKING}:_update_committed_marker_cache_kernel")
def _update_committed_marker_cache(
    grid0,
    req_ids_ptr,
    thinking_token_budget_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    cached_last_start_ptr,
    cached_last_end_ptr,
    cached_scan_pos_ptr,
    reasoning_start_token_ids_ptr,
    natural_reasoning_end_token_ids_ptr,
    START_LEN,
    NATURAL_END_LEN,
    MAX_LEN,
    BLOCK,
):
    for i in range(grid0):
        slot = req_ids_ptr[i]
        if thinking_token_budget_ptr[slot] < 0:
            continue
        total, scanned = total_len_ptr[slot], cached_scan_pos_ptr[slot]
        start, end = cached_last_start_ptr[slot], cached_last_end_ptr[slot]
        tokens = all_token_ids_ptr[slot * all_token_ids_stride : (slot + 1) * all_token_ids_stride]
        if scanned > total:
            scanned, start, end = 0, -1, -1
        # The first scan goes back block by block until it finds a marker.
        low = high = total
        if scanned == 0 and start < 0 and end < 0:
            low = max(high - BLOCK, 0)
        else:
            low = scanned
        while high > 0 and low < high:
            new_start = _last_match(
                tokens,
                low,
                high,
                total,
                reasoning_start_token_ids_ptr,
                START_LEN,
            )
            new_end = _last_match(
                tokens,
                low,
                high,
                total,
                natural_reasoning_end_token_ids_ptr,
                NATURAL_END_LEN,
            )
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
def _effective_match(tokens, total, drafts, first, begin, marker, length):
    """Whether a marker begins at `begin` of the output followed by this step's drafts."""
    for j in range(length):
        pos = begin + j
        # Row `first` of the step is the output's last token; the drafts follow it.
        token = tokens[pos] if pos < total else drafts[first + pos - total + 1]
        if token != marker[j]:
            return False
    return True


@twin(f"{_THINKING}:_thinking_budget_kernel")
def _thinking_budget(
    grid0,
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    thinking_token_budget_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    input_ids_ptr,
    expanded_local_pos_ptr,
    cached_last_start_ptr,
    cached_last_end_ptr,
    reasoning_start_token_ids_ptr,
    natural_reasoning_end_token_ids_ptr,
    reasoning_end_token_ids_ptr,
    START_LEN,
    NATURAL_END_LEN,
    END_LEN,
):
    for i in range(grid0):
        slot = expanded_idx_mapping_ptr[i]
        budget = thinking_token_budget_ptr[slot]
        if budget < 0:
            continue
        local_pos = expanded_local_pos_ptr[i]
        first = i - local_pos
        total = total_len_ptr[slot]
        length = total + local_pos
        tokens = all_token_ids_ptr[slot * all_token_ids_stride : (slot + 1) * all_token_ids_stride]
        start, end = cached_last_start_ptr[slot], cached_last_end_ptr[slot]
        for at in range(max(total - START_LEN + 1, 0), length - START_LEN + 1):
            if _effective_match(
                tokens,
                total,
                input_ids_ptr,
                first,
                at,
                reasoning_start_token_ids_ptr,
                START_LEN,
            ):
                start = at
        for at in range(max(total - NATURAL_END_LEN + 1, 0), length - NATURAL_END_LEN + 1):
            if _effective_match(
                tokens,
                total,
                input_ids_ptr,
                first,
                at,
                natural_reasoning_end_token_ids_ptr,
                NATURAL_END_LEN,
            ):
                end = at
        if start < 0 or start <= end or length - start - START_LEN < budget:
            continue
        # Continue an end marker that is partly written.
        begun = 0
        for prefix in range(1, min(END_LEN - 1, length) + 1):
            if _effective_match(
                tokens,
                total,
                input_ids_ptr,
                first,
                length - prefix,
                reasoning_end_token_ids_ptr,
                prefix,
            ):
                begun = prefix
        row = logits_ptr[i * logits_stride : (i + 1) * logits_stride]
        row[reasoning_end_token_ids_ptr[begun]] = 1.0e9
