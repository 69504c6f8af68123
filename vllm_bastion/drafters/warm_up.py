# SPDX-License-Identifier: Apache-2.0
"""Compile the drafter's kernels at a start, so that no request waits for them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

_MAX_INPUT_BLOCK = 256  # of vLLM's `prepare_dflash_inputs`


def warm_up(draft: Any) -> None:
    """Compile the kernels of a `BastionSpeculator`: first request, accepted path, n-gram draft.

    vLLM's input kernel is compiled for every block size, which depends on the longest query.
    """
    none = torch.zeros(1, dtype=torch.int32, device=draft.device)
    states = draft.req_states
    block = next_power_of_2(1 + draft.num_query_per_req)
    while block <= _MAX_INPUT_BLOCK:
        rows = min(block - draft.num_query_per_req, len(draft.context.source))
        if rows + draft.num_query_per_req <= block // 2:
            break  # no batch has a query this long
        batch = InputBatch.make_dummy(1, rows, draft.target_input_buffers)
        DFlashSpeculator.propose(
            draft, batch, {}, {}, draft.hidden_states, None, none, none,
            states.last_sampled_tokens, states.next_prefill_tokens, draft.temperature,
            draft.seeds, dummy_run=True, is_profile=True,
        )  # fmt: skip
        block *= 2
    if draft.trees.ngram is not None:
        draft.trees.bind_rows()
        draft.trees.grow_ngram(1)
    draft.context.warm_up()
