# SPDX-License-Identifier: Apache-2.0
"""Arguments for the kernels that other methods than "bastion" launch."""

from __future__ import annotations

import torch

from tests.cpu.replacement_cases import REQS, SLOTS, STEPS, VOCAB, Draw, Launch, case, expanded

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_UTILS = f"{_SAMPLER}_utils"
_STATS = f"{_UTILS}:_compute_local_logits_stats_kernel"
_DFLASH2 = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"
_BLOCKS = 3
_K = 6


@case(f"{_SAMPLER}:_flatten_sampled_kernel")
def flatten_sampled(draw: Draw) -> Launch:
    starts = draw.starts(STEPS + 1)
    return Launch(
        (REQS,), flat_sampled_ptr=draw.longs(-9, 0, int(starts[-1]) + 2),
        sampled_ptr=draw.rows(draw.longs(0, VOCAB, REQS, STEPS + 1)),
        num_sampled_ptr=torch.minimum(draw.ints(0, STEPS + 2, REQS), starts.diff()),
        cu_num_logits_ptr=starts,
    )  # fmt: skip


@case(f"{_SAMPLER}:_gather_draft_sampled_kernel")
def gather_draft_sampled(draw: Draw) -> Launch:
    slots, positions = expanded(draw.starts(STEPS + 1, 1), draw.slots())
    rows = len(slots)
    return Launch(
        (-(-rows // 8),), draft_sampled_ptr=draw.ints(-9, 0, rows + 2),
        pos_ptr=draw.longs(-9, 0, rows + 2), input_ids_ptr=draw.ints(0, VOCAB, 40),
        positions_ptr=draw.longs(0, 40, 40), logits_indices_ptr=draw.longs(0, 40, rows),
        expanded_idx_mapping_ptr=slots, expanded_local_pos_ptr=positions,
        prefill_len_ptr=draw.ints(1, 40, SLOTS), num_logits=rows, BLOCK_SIZE=8,
    )  # fmt: skip


class _Verified:
    """A batch of drafts with the target's logits."""

    def __init__(self, draw: Draw) -> None:
        self.starts = draw.starts(STEPS + 1, 1)
        self.slots = draw.slots()
        self.row_slots, self.positions = expanded(self.starts, self.slots)
        self.rows = len(self.row_slots)
        self.logits = draw.rows(draw.floats(self.rows, VOCAB) * 2)
        self.temperature, self.seeds = draw.temperatures(), draw.seeds()
        self.pos = draw.longs(0, 4000, self.rows)
        # Most drafts are the target's argmax, so that some are accepted and some are not.
        best = self.logits.argmax(dim=1).roll(1).to(torch.int32)
        other = draw.ints(0, VOCAB, self.rows)
        self.drafts = torch.where(draw.ints(0, 4, self.rows) > 0, best, other)
        if draw.hostile:
            self.drafts[draw.ints(0, 6, self.rows) == 0] = -1
        self.maxes = draw.floats(self.rows, _BLOCKS)
        self.sums = draw.floats(self.rows, _BLOCKS).abs()
        self.argmaxes = draw.longs(0, VOCAB, self.rows, _BLOCKS)
        blocks = self.logits.contiguous().split(256, dim=1)
        for i, block in enumerate(blocks):
            self.maxes[:, i], self.argmaxes[:, i] = block.max(dim=1)
            self.argmaxes[:, i] += 256 * i
            self.sums[:, i] = (block - self.maxes[:, i : i + 1]).exp().sum(dim=1)


NO_DRAFT_LOGITS = {
    "draft_logits_ptr": None, "draft_logits_stride_0": 0, "draft_logits_stride_1": 0,
    "HAS_DRAFT_LOGITS": False,
}  # fmt: skip


@case(_STATS)
def local_logits_stats(draw: Draw) -> Launch:
    batch = _Verified(draw)
    out = [draw.floats(batch.rows, _BLOCKS) for _ in range(4)]
    return Launch(
        (batch.rows, _BLOCKS), target_local_argmax_ptr=draw.longs(-9, 0, batch.rows, _BLOCKS),
        target_local_max_ptr=out[0], target_local_sumexp_ptr=out[1], draft_local_max_ptr=out[2],
        draft_local_sumexp_ptr=out[3], target_logits_ptr=batch.logits,
        expanded_idx_mapping_ptr=batch.row_slots, expanded_local_pos_ptr=batch.positions,
        temp_ptr=batch.temperature, num_speculative_steps=STEPS, num_logits=batch.rows,
        **NO_DRAFT_LOGITS,
    )  # fmt: skip


@case(f"{_UTILS}:_rejection_kernel")
def rejection(draw: Draw) -> Launch:
    batch = _Verified(draw)
    return Launch(
        (REQS,), sampled_ptr=draw.longs(-9, 0, REQS, STEPS + 1),
        rejected_steps_ptr=draw.ints(-9, 0, REQS), target_rejected_logsumexp_ptr=draw.floats(REQS),
        draft_rejected_logsumexp_ptr=draw.floats(REQS), target_logits_ptr=batch.logits,
        target_local_argmax_ptr=batch.argmaxes, target_local_max_ptr=batch.maxes,
        target_local_sumexp_ptr=batch.sums, draft_sampled_ptr=batch.drafts,
        draft_local_max_ptr=batch.maxes, draft_local_sumexp_ptr=batch.sums,
        cu_num_logits_ptr=batch.starts, idx_mapping_ptr=batch.slots, temp_ptr=batch.temperature,
        seed_ptr=batch.seeds, pos_ptr=batch.pos,
        synthetic_conditional_rates_ptr=None,
        cumulative_log_p_ptr=None, local_residual_mass_ptr=None, local_residual_mass_stride=0,
        fly_entropy_ptr=None, fly_entropy_threshold=0.3, FLY_WINDOW_SIZE=0,
        vocab_num_blocks=_BLOCKS, PADDED_VOCAB_NUM_BLOCKS=4, SYNTHETIC_MODE=False,
        USE_BLOCK_VERIFICATION=False, **NO_DRAFT_LOGITS,
    )  # fmt: skip


@case(f"{_UTILS}:_resample_kernel")
def resample(draw: Draw) -> Launch:
    batch = _Verified(draw)
    return Launch(
        (REQS, _BLOCKS), resampled_local_argmax_ptr=draw.longs(-9, 0, REQS, _BLOCKS),
        resampled_local_max_ptr=draw.floats(REQS, _BLOCKS), target_logits_ptr=batch.logits,
        target_rejected_logsumexp_ptr=draw.floats(REQS),
        draft_rejected_logsumexp_ptr=draw.floats(REQS),
        rejected_step_ptr=(draw.ints(0, STEPS + 1, REQS) % batch.starts.diff()).to(torch.int32),
        cu_num_logits_ptr=batch.starts, expanded_idx_mapping_ptr=batch.row_slots,
        draft_sampled_ptr=batch.drafts, temp_ptr=batch.temperature, seed_ptr=batch.seeds,
        pos_ptr=batch.pos, cumulative_log_p_ptr=None, contexts_ptr=None, contexts_stride=0,
        watermarking_ptr=None, watermarking_skip_mask_ptr=None, watermark_key_0=0,
        watermark_key_1=0, USE_FP64=False, USE_BLOCK_VERIFICATION=False, CONTEXT_WIDTH=1,
        WATERMARK=False, DEDUPLICATE_CONTEXTS=False, **NO_DRAFT_LOGITS,
    )  # fmt: skip


@case(f"{_UTILS}:_insert_resampled_kernel")
def insert_resampled(draw: Draw) -> Launch:
    batch = _Verified(draw)
    maxes = draw.floats(REQS, _BLOCKS)
    if draw.hostile:
        maxes[:, 1] = torch.nan
    return Launch(
        (REQS,), sampled_ptr=draw.longs(-9, 0, REQS, STEPS + 1),
        num_sampled_ptr=(draw.ints(0, STEPS + 1, REQS) % batch.starts.diff()).to(torch.int32),
        resampled_local_argmax_ptr=draw.longs(0, VOCAB, REQS, _BLOCKS),
        resampled_local_max_ptr=maxes, resample_num_blocks=_BLOCKS, cu_num_logits_ptr=batch.starts,
        expanded_idx_mapping_ptr=batch.row_slots, temp_ptr=batch.temperature,
        PADDED_RESAMPLE_NUM_BLOCKS=4,
    )  # fmt: skip


def _candidates(draw: Draw, rows: int) -> torch.Tensor:
    """[rows, K] int64, distinct in a row."""
    return draw.floats(rows, VOCAB).argsort(-1)[:, :_K].contiguous()


@case(f"{_DFLASH2}:_selector_walk_kernel")
def walk(draw: Draw) -> Launch:
    scores = draw.floats(REQS, STEPS, _K, _K)
    if draw.hostile:
        scores = (scores * 2).round()
        scores[0, 1:] = -torch.inf
    slots = draw.slots(negative=True)
    return Launch(
        (REQS,), scores_ptr=scores, candidate_ptr=_candidates(draw, REQS * STEPS),
        sample_pos_ptr=draw.longs(1, 300, REQS * STEPS),
        req_state_ptr=slots.to(torch.int64).repeat_interleave(STEPS),
        tokens_ptr=torch.full((REQS, STEPS), -9, dtype=torch.int64),
        realized_scores_ptr=torch.zeros(REQS, STEPS, _K), num_steps=STEPS, top_k=_K, BLOCK_K=8,
        SAMPLE_PROBABILISTIC=False, USE_FP64=False,
    )  # fmt: skip


@case(f"{_DFLASH2}:_cache_draft_logits_kernel")
def cache_draft_logits(draw: Draw) -> Launch:
    slots = draw.slots(negative=True)
    logits = draw.rows(draw.floats(SLOTS * STEPS, VOCAB))
    return Launch(
        (REQS * STEPS,), draft_logits_ptr=logits,
        cached_candidate_ptr=_candidates(draw, SLOTS * STEPS),
        candidate_ptr=_candidates(draw, REQS * STEPS), scores_ptr=draw.floats(REQS, STEPS, _K),
        req_state_ptr=slots.to(torch.int64).repeat_interleave(STEPS),
        draft_logits_stride_0=STEPS * logits.stride(0), draft_logits_stride_1=logits.stride(0),
        num_steps=STEPS, top_k=_K, BLOCK_K=8,
    )  # fmt: skip
