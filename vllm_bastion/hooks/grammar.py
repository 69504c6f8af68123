# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part in trees of requests with a grammar; see `engine.grammar`.

Without async scheduling the core knows a tree before it schedules the step that verifies it: it
schedules what the grammar allows, and sends the columns with the step. With async scheduling the
step has been launched by the time the core receives the tree; while the target runs, the core
determines what may follow each node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_bastion.attached import GrammarTree, RequestState, StepPlan
from vllm_bastion.config import chain_view_of, settings_of
from vllm_bastion.versions import capabilities


class GrammarScheduler(Scheduler):
    """vLLM's scheduler, which shows a grammar the tree where vLLM shows it one linear sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings_of(self.vllm_config)
        # It sizes a grammar's rollback by speculative tokens; a path has fewer than a tree.
        self.structured_output_manager.vllm_config = chain_view_of(
            self.vllm_config, self.settings.max_chain_tokens
        )

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Schedule the nodes that a grammar allows."""
        others: tuple[list[str], list[list[int]]] = ([], [])
        for request_id, codes in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if _has_tree(request):
                codes = codes[: self.settings.max_grammar_tokens]
                tree = _walk(self, request, codes, prune=True)
                request.spec_token_ids = list(tree.tokens)
            else:
                others[0].append(request_id)
                others[1].append(codes)
        super().update_draft_token_ids(
            replace(draft_token_ids, req_ids=others[0], draft_token_ids=others[1])
        )

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Set the drafts of a step that was launched already; all of its nodes stay."""
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
        super().update_draft_token_ids_in_output(
            replace(draft_token_ids, req_ids=others[0], draft_token_ids=others[1]),
            scheduler_output,
        )
        scheduler_output.num_invalid_spec_tokens.update(refused)

    def get_grammar_bitmask(self, scheduler_output: Any) -> GrammarOutput | None:
        """A row for the root and every node of each tree."""
        if not scheduler_output.has_structured_output_requests:
            return None
        found = {name: self.requests.get(name) for name in scheduler_output.num_scheduled_tokens}
        with_grammar = [
            request
            for request in found.values()
            if request is not None
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not with_grammar:
            return None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        rows = np.concatenate([self._rows_of(request, scheduled) for request in with_grammar])
        names = [request.request_id for request in with_grammar]
        accepts = [len(strip_speculative_padding(scheduled.get(name, []))) for name in names]
        return GrammarOutput(names, rows, accepts)

    def _rows_of(self, request: Any, scheduled: dict[str, list[int]]) -> np.ndarray:
        name = request.request_id
        drafts = scheduled.get(name, [])
        tree, rows = _tree_of(request), None
        if tree is not None and drafts:
            rows = tree.rows_of(drafts, request.num_tokens)
        if rows is None:
            if drafts:  # not known to the grammar: none may be followed
                scheduled[name] = [-1] * len(drafts)
            manager = self.structured_output_manager
            root = manager.grammar_bitmask(self.requests, [name], {})[:1]
            rows = np.full((1 + len(drafts), root.shape[1]), -1, dtype=np.int32)
            rows[:1] = root
        if capabilities().pads_grammar_rows:
            missing = 1 + self.settings.max_grammar_tokens - len(rows)
            rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=-1)
        return rows


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
