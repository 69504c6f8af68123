# SPDX-License-Identifier: Apache-2.0
"""Compile the drafter's kernels at a start, so that no request waits for them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from bastion_kernels import context_rows, gather_rows

_MAX_INPUT_BLOCK = 256  # of vLLM's `prepare_dflash_inputs`


def warm_up(draft: Any) -> None:
    """Compile the kernels of a `BastionSpeculator`: first request, accepted path, n-gram draft."""
    _warm_up_inputs(draft)
    if draft.trees.ngram is not None:
        draft.trees.bind_rows()
        draft.trees.grow_ngram(1)
    one = draft._context_layout[:1].zero_()
    two = torch.zeros(2, dtype=torch.int32, device=draft.device)
    positions, rejected = draft._accepted_positions, draft._context_rejected[:1]
    slots = list(draft._context_slots)
    # With no cache, and with those of rows that wait, from an even or an odd row on.
    for caches in (((), ()), (slots, slots), (slots, [group[1:] for group in slots])):
        context_rows(two, one, two, two, draft.trees.path, positions, one, one,
                     draft.context_source, positions, rejected, 1, *caches)  # fmt: skip
    rows = draft.context_source[:1].fill_(-1)
    gather_rows(draft.context_hidden, rows, [torch.empty_like(h[:1]) for h in draft.context_hidden])


def _warm_up_inputs(draft: Any) -> None:
    """Compile vLLM's input kernel for every block size; it depends on the longest query."""
    none = torch.zeros(1, dtype=torch.int32, device=draft.device)
    states = draft.req_states
    block = next_power_of_2(1 + draft.num_query_per_req)
    while block <= _MAX_INPUT_BLOCK:
        rows = min(block - draft.num_query_per_req, len(draft.context_source))
        if rows + draft.num_query_per_req <= block // 2:
            break  # no batch has a query this long
        batch = InputBatch.make_dummy(1, rows, draft.target_input_buffers)
        DFlashSpeculator.propose(
            draft, batch, {}, {}, draft.hidden_states, None, none, none,
            states.last_sampled_tokens, states.next_prefill_tokens, draft.temperature,
            draft.seeds, dummy_run=True, is_profile=True,
        )  # fmt: skip
        block *= 2
