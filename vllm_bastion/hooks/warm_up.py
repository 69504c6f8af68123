# SPDX-License-Identifier: Apache-2.0
"""Wrappers that keep vLLM's warm-up within the model's length, and its profile above any step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from vllm_bastion.config import bastion_config
from vllm_bastion.platform import current_host


def warm_up_kernels(original: Callable[..., Any], model_runner: Any, *args: Any, **kw: Any) -> Any:
    """vLLM's warm-up, with no more drafts than fit the model's length and one step."""
    config = model_runner.vllm_config
    steps, rows = model_runner.num_speculative_steps, model_runner.decode_query_len
    if bastion_config(config) is None:
        return original(model_runner, *args, **kw)
    from vllm_bastion.engine.limits import max_verified_rows

    most, scheduler = max_verified_rows(config), model_runner.scheduler_config
    # The first request takes 4 rows + 3 tokens: a prompt of rows + 1, three steps with drafts, and
    # two without.
    fitting = min((model_runner.max_model_len - 3) // 4, most)
    left_out = min(max(0, rows - fitting), steps - 1)
    few = copy.copy(scheduler)
    few.max_num_seqs = min(scheduler.max_num_seqs, max(1, most // (rows - left_out)))
    try:
        model_runner.scheduler_config = few
        model_runner.num_speculative_steps = steps - left_out
        model_runner.decode_query_len = rows - left_out
        return original(model_runner, *args, **kw)
    finally:
        model_runner.scheduler_config = scheduler
        model_runner.num_speculative_steps, model_runner.decode_query_len = steps, rows


def dummy_sampler_run(original: Callable[..., Any], self: Any, hidden_states: Any) -> Any:
    """vLLM's run, then the logits of the largest step: the sampler copies them to float32.

    A CPU engine does not derive its cache from what is in use.
    """
    original(self, hidden_states)
    if bastion_config(self.vllm_config) is None or not current_host().runs_ahead:
        return
    from vllm_bastion.engine.limits import max_verified_rows
    from vllm_bastion.engine.profile import head_input

    logits = self.model.compute_logits(head_input(self, max_verified_rows(self.vllm_config)))
    torch.empty_like(logits, dtype=torch.float32)
