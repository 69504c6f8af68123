# SPDX-License-Identifier: Apache-2.0
"""Hooks in the engine core that let requests with a grammar have trees; see `engine.grammar`.

Without async scheduling the core knows a tree before it schedules the step that verifies it: it
schedules what the grammar allows, and sends the columns with the step. With async scheduling the
step has been launched by the time the core receives the tree; while the target runs, the core
determines what may follow each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_bastion.carriers import GrammarLimits, GrammarTree, RequestState, StepPlan
from vllm_bastion.config import bastion_config
from vllm_bastion.versions import capabilities


def update_draft_token_ids(original: Callable[..., Any], self: Any, draft_token_ids: Any) -> None:
    """Schedule the nodes that a grammar allows; vLLM treats drafts as one linear sequence."""
    spec_config = bastion_config(self.vllm_config)
    if spec_config is None:
        original(self, draft_token_ids)
        return
    others: tuple[list[str], list[list[int]]] = ([], [])
    for request_id, codes in zip(
        draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
    ):
        request = self.requests.get(request_id)
        if _has_tree(request):
            codes = codes[: spec_config.max_grammar_tokens]
            tree = _walk(self, request, codes, prune=True)
            request.spec_token_ids = list(tree.tokens)
        else:
            others[0].append(request_id)
            others[1].append(codes)
    original(self, replace(draft_token_ids, req_ids=others[0], draft_token_ids=others[1]))


def _has_tree(request: Any) -> bool:
    return (
        request is not None
        and request.use_structured_output
        and not request.is_finished()
        and not request.is_prefill_chunk
    )


def _walk(scheduler: Any, request: Any, codes: list[int], prune: bool) -> GrammarTree:
    from vllm_bastion.engine.grammar import decode, walk

    tree = walk(scheduler.structured_output_manager, request, *decode(codes), prune)
    RequestState.ensure(request).grammar_tree = tree
    return tree


def _tree_of(request: Any) -> GrammarTree | None:
    state = RequestState.find(request)
    return None if state is None else state.grammar_tree


def attach_plan(scheduler: Any, output: Any, plan: StepPlan) -> None:
    """Tell the worker which nodes of a tree were scheduled, unless they are its first ones."""
    for request_id, tokens in output.scheduled_spec_decode_tokens.items():
        tree = _tree_of(scheduler.requests.get(request_id))
        if tree is not None and tree.pruned and tree.tokens[: len(tokens)] == tokens:
            columns = tree.columns[: len(tokens)], tree.parents[: len(tokens)]
            plan.grammar_columns[request_id] = columns
    plan.attach(output)


def update_draft_token_ids_in_output(
    original: Callable[..., Any], self: Any, draft_token_ids: Any, scheduler_output: Any
) -> None:
    """Set the drafts of a step that was launched already; all of its nodes stay."""
    if bastion_config(self.vllm_config) is None:
        original(self, draft_token_ids, scheduler_output)
        return
    scheduled, refused = scheduler_output.scheduled_spec_decode_tokens, {}
    others: tuple[list[str], list[list[int]]] = ([], [])
    for request_id, codes in zip(
        draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
    ):
        request = self.requests.get(request_id)
        placeholders = scheduled.get(request_id)
        if placeholders and _has_tree(request):
            tree = _walk(self, request, codes[: len(placeholders)], prune=False)
            missing = len(placeholders) - len(tree.tokens)
            scheduled[request_id] = tree.tokens + [-1] * missing
            if tree.refused + missing:
                refused[request_id] = tree.refused + missing
        else:
            others[0].append(request_id)
            others[1].append(codes)
    original(
        self,
        replace(draft_token_ids, req_ids=others[0], draft_token_ids=others[1]),
        scheduler_output,
    )
    scheduler_output.num_invalid_spec_tokens.update(refused)


def grammar_bitmask(
    original: Callable[..., Any],
    self: Any,
    requests: dict[str, Any],
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: dict[str, list[int]],
) -> Any:
    """A row for the root and every node of a tree; vLLM walks one linear sequence."""
    if bastion_config(self.vllm_config) is None or not structured_output_request_ids:
        return original(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)
    max_drafts = GrammarLimits.of(self).max_drafts
    parts = []
    for request_id in structured_output_request_ids:
        request = requests[request_id]
        drafts = scheduled_spec_decode_tokens.get(request_id, [])
        tree, rows = _tree_of(request), None
        if tree is not None and drafts:
            rows = tree.rows_of(drafts, request.num_tokens)
        if rows is None:
            if drafts:  # not known to the grammar: none may be followed
                scheduled_spec_decode_tokens[request_id] = [-1] * len(drafts)
            root = original(self, requests, [request_id], {})[:1]
            rows = np.full((1 + len(drafts), root.shape[1]), -1, dtype=np.int32)
            rows[:1] = root
        if capabilities().pads_grammar_rows:
            rows = np.pad(rows, ((0, 1 + max_drafts - len(rows)), (0, 0)), constant_values=-1)
        parts.append(rows)
    return np.concatenate(parts)
