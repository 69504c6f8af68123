# SPDX-License-Identifier: Apache-2.0
"""Makes the record of a step when it is scheduled, and again once its tokens are sampled.

See `vllm_bastion.step`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host
from vllm_bastion.step import Step


def make_step(runtime: Runtime, batch: InputBatch, *, always_binds: bool, for_trees: bool) -> Step:
    """The record of `batch`, and the controller's decision about its draft.

    Args:
        always_binds: whether some kernel reads the request slots of every step.
        for_trees: whether a FULL graph is captured that is replayed for batches with trees.
    """
    trees, timed = runtime.trees, runtime.timed_spares
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:  # a dummy batch, or a step without drafts
        nodes = np.zeros(batch.num_reqs, dtype=np.int32)
        base_rows = batch.num_scheduled_tokens
    else:
        base_rows, nodes = batch.num_scheduled_tokens - drafts, drafts
        if batch.max_query_len is not None:
            # The manager has trimmed the step. It does not trim vLLM's warm-up steps.
            assert runtime.manager is not None
            nodes = runtime.manager.drafts
    computed = batch.num_computed_tokens_np
    has_nodes = bool(nodes.any())
    step = Step(
        batch,
        nodes,
        base_rows,
        context_len=0.0 if computed is None else float(computed.sum()) / len(computed),
        binds=always_binds or has_nodes or timed is not None,
        masked=for_trees or timed is not None or (has_nodes and not trees.chains),
        walks=batch.num_draft_tokens > 0,
        spared=timed or 0,
        announces=runtime.step.announces,
        is_trial=runtime.step.is_trial,
    )
    is_real = runtime.scheduled is not None and timed is None
    return _decide(runtime, step, batch) if is_real else step


def _decide(runtime: Runtime, step: Step, batch: InputBatch) -> Step:
    """Add whether the step ends with a draft."""
    if runtime.trees.budget == 0:
        return replace(step, drafts=False, announces=False)
    controller, reach, spared = runtime.controller, runtime.reach, 0
    # vLLM asks for 0 where no request of the step can use a draft.
    assert runtime.scheduled is not None
    wanted = runtime.scheduled.num_spec_tokens_to_schedule > 0
    if reach is not None:
        slots = batch.idx_mapping_np
        if step.walks:
            decodes = step.base_rows == 1
            deepest = runtime.trees.deepest(slots, step.nodes)
            reach.observe(slots[decodes], deepest[decodes])
        spared = reach.depth - reach.of(slots)
    if controller is None:
        return replace(step, drafts=wanted, spared=spared)
    runtime.learn()
    context = step.context_len
    if batch.has_prefill:  # of the next step, when the prompts are cached too
        seen = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        context = float(seen.sum()) / len(seen)
    if not wanted or runtime.manager is None:
        controller.price(batch.num_reqs, context, spared)
        return replace(step, drafts=wanted, spared=spared)
    decision = runtime.manager.plan(batch, context, spared)
    if decision.replies_end:
        return replace(step, drafts=decision.drafts, spared=spared)
    # With async scheduling the next step is scheduled before this one's output arrives. So a draft
    # must be announced a step early; otherwise there are no placeholders for its tree.
    announces = decision.drafts or (decision.looks_up and controller.copies_pay)
    drafts = decision.drafts
    if runtime.announces_early:
        # Placeholders that were announced for a draft get copies if copies now pay more, but those
        # of a trial show what a draft costs.
        drafts = step.announces and (drafts or step.is_trial or not decision.looks_up)
    looks_up = decision.looks_up and drafts == decision.drafts
    refused = not drafts and not runtime.plan.backlog
    return replace(
        step,
        drafts=drafts,
        spared=spared,
        looks_up=looks_up,
        announces=announces,
        is_trial=decision.drafts and decision.is_trial,
        refused=refused,
    )


def decide_again(runtime: Runtime, batch: InputBatch, num_sampled: torch.Tensor) -> Step:
    """The record of the current step after sampling, where the host knows its tokens.

    The draft is cut where all replies end, and dropped where copies alone pay more.

    num_sampled: [R] int32 tokens that the requests have emitted in this step.
    """
    step, manager = runtime.step, runtime.manager
    decided = step.grows and runtime.controller is not None and manager is not None
    if not decided or current_host().runs_ahead:
        return step
    assert manager is not None
    slots, remaining = manager.continuing(batch, num_sampled)
    if not len(slots):
        return replace(step, drafts=False, looks_up=False)
    last = int(remaining.max())
    changes: dict[str, Any] = {"longest_copy": last - 1}
    if step.looks_up:
        changes |= _with_copies(runtime, step, batch.num_reqs, slots, remaining)
    if runtime.reach is not None:
        changes["spared"] = max(step.spared, runtime.reach.depth + 1 - last)
    return replace(step, **changes)


def _with_copies(
    runtime: Runtime, step: Step, num_reqs: int, slots: np.ndarray, remaining: np.ndarray
) -> dict[str, bool]:
    """Look for copies. They take the place of the draft, or of a plain step, if they pay more.

    Args:
        num_reqs: of the batch.
        slots: [C] slots of requests that continue.
        remaining: [C] most tokens that each may emit from the next step on.

    Returns:
        Changes to the record of the step.
    """
    controller, copies = runtime.controller, runtime.trees.copies
    assert controller is not None and copies is not None
    rows = runtime.trees.row_slots[:num_reqs]
    copies.find(rows)
    most = np.minimum(remaining - 1, runtime.trees.node_limits_host[slots])
    scores = copies.scores(slots, most)
    promised = scores.sum(axis=1)
    if promised.any() and controller.prefers_copies(
        slots.tolist(), remaining.tolist(), scores, step.drafts
    ):
        if step.drafts and runtime.recorder is not None:
            runtime.recorder.copied()
        return {"drafts": False, "announces": True}
    if not step.drafts:
        copies.give_up(rows)
        controller.observe_copies(slots, promised, (0, 0.0))
    return {"looks_up": False, "announces": step.drafts}
