# SPDX-License-Identifier: Apache-2.0
"""Makes the record of a step when it is scheduled, and again once its tokens are sampled.

See `vllm_bastion.step`.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.step import Step


def make_step(runtime: Runtime, batch: InputBatch, *, for_trees: bool) -> Step:
    """The record of `batch`.

    Args:
        for_trees: whether a graph is being captured that takes batches with trees.
    """
    drafts, base_rows = batch.num_draft_tokens_per_req, batch.num_scheduled_tokens
    nodes, has_nodes = np.zeros(batch.num_reqs, dtype=np.int32), False
    if drafts is not None:  # else a dummy batch, or a step without drafts
        nodes, base_rows = drafts, base_rows - drafts
        if batch.max_query_len is not None:
            # The manager has trimmed the step. It does not trim vLLM's warm-up steps.
            assert runtime.manager is not None
            nodes = runtime.manager.drafts
        has_nodes = bool(nodes.any())
    arm, scheduled = Arm.TREE, runtime.scheduled
    if scheduled is not None:
        # vLLM asks for 0 where no request of the step can use a draft.
        wanted = scheduled.num_spec_tokens_to_schedule > 0 and runtime.trees.budget != 0
        arm = runtime.plan.arm if wanted else Arm.PLAIN
    return Step(
        batch,
        nodes,
        base_rows,
        masked=for_trees or runtime.profiles or (has_nodes and not runtime.trees.chains),
        verifies=batch.num_draft_tokens > 0,
        arm=arm,
    )


def decide_again(
    runtime: Runtime, batch: InputBatch, num_sampled: torch.Tensor, states: RequestState
) -> Step:
    """The record of the current step after sampling, where the host knows its tokens (a CPU).

    Plain if every reply ends with its next token. Trees become n-gram only if that is expected to
    be as fast; n-gram only becomes plain if no draft was found.

    Args:
        num_sampled: [R] int32 tokens that the requests have emitted in this step.
    """
    step, ngram = runtime.step, runtime.trees.ngram
    if not step.grows or current_host().runs_ahead:
        return step
    slots = batch.idx_mapping_np
    end = np.minimum(states.max_seq_len[slots], states.max_model_len)
    remaining = (end - states.total_len.gpu.numpy()[slots])[num_sampled.numpy() > 0]
    last = int(remaining.max(initial=0))
    if last <= 1:
        return step._replace(arm=Arm.PLAIN)
    if ngram is None:
        return step
    ngram.longest = last - 1
    if runtime.trees.chains:
        return step
    expected = ngram.expected(slots, runtime.trees.node_limits_host[slots])
    if step.arm == Arm.NGRAM:
        if expected.any():
            return step
        ngram.give_up(runtime.trees.row_slots[: len(slots)])
        return step._replace(arm=Arm.PLAIN)
    enough = runtime.plan.ngram_tokens
    pays = enough is not None and len(slots) + expected.sum() >= enough * len(slots)
    return step._replace(arm=Arm.NGRAM) if pays else step
