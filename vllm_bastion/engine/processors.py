# SPDX-License-Identifier: Apache-2.0
"""vLLM's logits processors that read earlier tokens, on the nodes of a tree.

Penalties, bad words and thinking budgets take the rows before a row as the drafts before it, which
is right for a chain. `follow_ancestors` makes them read a node's ancestors instead. Their state and
everything else stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from bastion_kernels import ancestor_tokens, mask_bad_words, penalise_ancestors
from vllm_bastion.policy.trees import Trees

_Apply = Callable[[torch.Tensor, LogitsContext], Any]
# Processors that are right on a tree, as they are or after `follow_ancestors`.
_KNOWN = (LogitBiasState, PenaltiesState, BadWordsState)


def has_unknown(sampler: Sampler) -> bool:
    """Whether there is a custom logits processor, whose state we cannot track.

    Read from the sampler: an installed package may register one that no configuration names.
    """
    return any(not isinstance(processor, _KNOWN) for processor in sampler.logits_processors)


class Ancestors:
    """The ancestors of the rows that are being processed.

    tokens: [L, D] int64 and depths: [L] int32, see `ancestor_tokens`. None while the rows are not
    nodes, or if no request of the step needs them.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.tokens: torch.Tensor | None = None
        self.depths: torch.Tensor | None = None

    def wanted(self, slots: np.ndarray) -> bool:
        """Whether a request in `slots`, [R], has a processor that reads them."""
        if not self._sampler.needs_logits_processing[slots].any():
            return False
        for processor in self._sampler.logits_processors:
            if isinstance(processor, PenaltiesState) and processor.use_penalty[slots].any():
                return True
            if isinstance(processor, BadWordsState) and processor.num_bad_words.np[slots].any():
                return True
        thinking = self._sampler.thinking_budget_state
        return thinking.enabled and bool(thinking.use_thinking_budget[slots].any())

    def gather(
        self, trees: Trees, node_ids: torch.Tensor, slots: torch.Tensor, nodes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [L, D] and depths [L] of the rows of a step.

        node_ids: [L] token of each row; slots: [L]; nodes: [L] node numbers.
        """
        rows = node_ids.shape[0]
        tokens = torch.empty(rows, trees.depth, dtype=torch.int64, device=node_ids.device)
        depths = torch.empty(rows, dtype=torch.int32, device=node_ids.device)
        ancestor_tokens(node_ids, trees.parents, slots, nodes, tokens, depths)
        return tokens, depths

    def show(self, ancestors: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """From now on processors read these tokens and depths; None = vLLM's own view."""
        self.tokens, self.depths = ancestors or (None, None)

    def penalise(
        self, state: PenaltiesState, original: _Apply, logits: torch.Tensor, ctx: LogitsContext
    ) -> Any:
        tokens = self.tokens
        if tokens is None or not state.use_penalty[ctx.idx_mapping_np].any():
            return original(logits, ctx)
        before = logits.gather(1, tokens.clamp(min=0))
        original(logits, replace(ctx, expanded_local_pos=torch.zeros_like(ctx.expanded_local_pos)))
        penalise_ancestors(
            logits, before, tokens, ctx.expanded_idx_mapping, state.repetition_penalty.gpu,
            state.frequency_penalty.gpu, state.presence_penalty.gpu, state.output_bin_counts,
        )  # fmt: skip
        return logits

    def mask_bad_words(
        self, state: BadWordsState, original: _Apply, logits: torch.Tensor, ctx: LogitsContext
    ) -> Any:
        tokens, depths, requests = self.tokens, self.depths, state.req_states
        max_words = int(state.num_bad_words.np[ctx.idx_mapping_np].max())
        if tokens is None or depths is None or max_words == 0:
            return original(logits, ctx)
        mask_bad_words(
            logits, tokens, depths, ctx.expanded_idx_mapping, state.bad_word_token_ids.gpu,
            state.bad_word_offsets.gpu, state.num_bad_words.gpu, requests.all_token_ids.gpu,
            requests.prompt_len.gpu, requests.total_len.gpu, max_words,
        )  # fmt: skip
        return logits

    def end_thinking(
        self, state: ThinkingBudgetState, original: _Apply, logits: torch.Tensor, ctx: LogitsContext
    ) -> None:
        """vLLM's thinking-budget kernel for all rows at once, on tensors."""
        tokens, depths = self.tokens, self.depths
        wanted = state.enabled and state.use_thinking_budget[ctx.idx_mapping_np].any()
        if tokens is None or depths is None or not wanted:
            original(logits, ctx)
            return
        # Called for no rows, so that it only updates the markers of emitted tokens.
        names = "expanded_idx_mapping", "expanded_local_pos", "input_ids"
        no_rows: Any = {name: getattr(ctx, name)[:0] for name in names}
        original(logits[:0], replace(ctx, **no_rows))
        slots = ctx.expanded_idx_mapping.long()
        start, end = state.reasoning_start_token_ids, state.reasoning_end_token_ids
        natural_end = state.natural_reasoning_end_token_ids
        # The last emitted tokens, then the ancestors: enough for a marker that ends at the row.
        back = max(len(start), len(natural_end), len(end)) - 1
        total = state.req_states.total_len.gpu[slots].long()
        positions = total[:, None] + torch.arange(-back, 0, device=logits.device)
        emitted = state.req_states.all_token_ids.gpu[slots[:, None], positions.clamp(min=0)]
        text = torch.cat([emitted.long().masked_fill(positions < 0, -1), tokens], dim=1)

        def last(marker: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
            """[L] position where the last marker starts, -1 if there is none."""
            found = (text[:, back + 1 - len(marker) :].unfold(1, len(marker), 1) == marker).all(-1)
            offset = 1 - len(marker) + torch.arange(found.shape[1], device=text.device)
            position = torch.where(found, total[:, None] + offset, -1).amax(1)
            return torch.where(position >= 0, position, cached[slots].long())

        last_start = last(start, state.cached_last_start)
        last_end = last(natural_end, state.cached_last_end)
        budget = state.thinking_token_budget.gpu[slots]
        spent = total + depths - last_start - len(start)
        over = (budget >= 0) & (last_start >= 0) & (last_start > last_end) & (spent >= budget)
        # Continue an end marker that the text has already started.
        written = torch.zeros_like(total)
        for length in range(1, len(end)):
            columns = back + depths[:, None] + torch.arange(-length, 0, device=text.device)
            matches = (text.gather(1, columns) == end[:length]).all(1)
            written = torch.where(matches, length, written)
        forced = end[written].long()[:, None]
        logits.scatter_(1, forced, logits.gather(1, forced).masked_fill(over[:, None], 1.0e9))


def follow_ancestors(sampler: Sampler) -> Ancestors:
    """Make the processors of `sampler` read what `Ancestors.show` shows them."""
    ancestors = Ancestors(sampler)
    for state in [*sampler.logits_processors, sampler.thinking_budget_state]:
        if isinstance(state, PenaltiesState):
            state.apply = partial(ancestors.penalise, state, state.apply)
        elif isinstance(state, BadWordsState):
            state.apply = partial(ancestors.mask_bad_words, state, state.apply)
        elif isinstance(state, ThinkingBudgetState):
            state.apply = partial(ancestors.end_thinking, state, state.apply)
    return ancestors
