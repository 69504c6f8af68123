# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part in trees of requests with a grammar; see `engine.grammar`.

The engine core checks a tree against its request's grammar. With async scheduling it does so while
the target runs, because the step is launched before the tree arrives. Nodes that the grammar
rejects stay in the step and are never accepted: their parents' bitmask rows do not allow them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_bastion.attached import GrammarTree
from vllm_bastion.config import chain_view_of, settings_of
from vllm_bastion.versions import capabilities


class GrammarScheduler(Scheduler):
    """vLLM's scheduler, which shows a grammar the tree where vLLM shows it one linear sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings_of(self.vllm_config)
        # The manager sizes a grammar's rollback by speculative tokens: those of a path, not N.
        self.structured_output_manager.vllm_config = chain_view_of(
            self.vllm_config, self.settings.max_chain_tokens
        )

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Schedule trees of requests with a grammar, at most `max_grammar_tokens` nodes of each."""
        trees, others = _with_grammar(draft_token_ids, self.requests.get)
        for request, codes in trees:
            tree = _walk(self, request, codes[: self.settings.max_grammar_tokens])
            request.spec_token_ids = list(tree.tokens)
        super().update_draft_token_ids(others)

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Set the drafts of a step that is already launched (async scheduling)."""
        scheduled, refused = scheduler_output.scheduled_spec_decode_tokens, {}
        trees, others = _with_grammar(
            draft_token_ids, lambda name: self.requests.get(name) if scheduled.get(name) else None
        )
        for request, codes in trees:
            name = request.request_id
            tree = _walk(self, request, codes[: len(scheduled[name])])
            missing = len(scheduled[name]) - len(tree.tokens)
            scheduled[name] = tree.tokens + [-1] * missing
            if tree.refused + missing:
                refused[name] = tree.refused + missing
        super().update_draft_token_ids_in_output(others, scheduler_output)
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
        tree, rows = GrammarTree.find(request), None
        if tree is not None and drafts:
            rows = tree.rows_of(drafts, request.num_tokens)
        if rows is None:
            if drafts:  # the grammar has not checked them: none may be accepted
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


def _with_grammar(
    drafts: DraftTokenIds, find: Callable[[str], Any]
) -> tuple[list[tuple[Any, list[int]]], DraftTokenIds]:
    """The requests of trees that a grammar checks, with the trees' codes, and all other drafts."""
    trees, names, others = [], [], []
    for name, codes in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
        if _has_tree(request := find(name)):
            trees.append((request, codes))
        else:
            names.append(name)
            others.append(codes)
    return trees, replace(drafts, req_ids=names, draft_token_ids=others)


def _walk(scheduler: Any, request: Any, codes: list[int]) -> GrammarTree:
    from vllm_bastion.engine.grammar import decode, walk

    tree = walk(scheduler.structured_output_manager, request, *decode(codes))
    tree.attach(request)
    return tree
