# SPDX-License-Identifier: Apache-2.0
"""Hooks around the warm-up of a worker of method "bastion".

Our kernels are compiled and step costs measured there, and vLLM's own warm-up is kept within the
model's length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from vllm_bastion.config import bastion_config
from vllm_bastion.hooks.ledger import BASTION_WORKER, Hook
from vllm_bastion.platform import current_host

WARM_UP_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        wrapper="warm_up:warm_up",
        expects="(self)",
        why="our kernels must be compiled and step costs measured before the first request",
        what="compiles the kernels, runs vLLM's warm-up and measures the costs",
        upstream="a callback after warm-up",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu.warmup:_warmup_kernels",
        wrapper="warm_up:warm_up_kernels",
        expects="(model_runner, worker_execute_model, worker_sample_tokens, greedy=)",
        why="its requests grow by four times N + 1 rows, so with a large N they exceed the model's "
        "length: their blocks are written into another request's row or past the table. All of "
        "them verify N drafts at once, whose logits take more memory than any step served",
        what="warms up with as many drafts as fit the length, of as many requests as one step can "
        "verify",
        upstream="bounds in `_warmup_kernels`",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run",
        wrapper="warm_up:dummy_sampler_run",
        expects="(self, hidden_states)",
        why="vLLM profiles logits of one row for each request, and a step that verifies has more",
        what="profiles the most logits that a step can have, in the model's type and in float32",
        upstream="a profiling run with the rows of a verifying step",
        when=BASTION_WORKER,
    ),
    Hook(
        target="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        wrapper="warm_up:warm_up",
        expects="(self)",
        why="as above: the CPU worker overrides the method",
        what="as above",
        upstream="a callback after warm-up",
        when=BASTION_WORKER,
    ),
)


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
    spared = min(max(0, rows - fitting), steps - 1)
    few = copy.copy(scheduler)
    few.max_num_seqs = min(scheduler.max_num_seqs, max(1, most // (rows - spared)))
    try:
        model_runner.scheduler_config = few
        model_runner.num_speculative_steps = steps - spared
        model_runner.decode_query_len = rows - spared
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
    from vllm_bastion.calibration.measure import head_input
    from vllm_bastion.engine.limits import max_verified_rows

    logits = self.model.compute_logits(head_input(self, max_verified_rows(self.vllm_config)))
    torch.empty_like(logits, dtype=torch.float32)


def warm_up(original: Callable[..., Any], self: Any) -> Any:
    """Compile our kernels before vLLM declares its warm-up over, and measure the step costs."""
    if bastion_config(self.vllm_config) is None:
        return original(self)
    from vllm_bastion.calibration.engine import calibrate
    from vllm_bastion.calibration.measure import dummy_tree_step

    runner = self.model_runner
    for part in (runner.model_state, runner.speculator, runner.adaptive_verification):
        part.warm_up()
    # Run the largest tree too: the trees of vLLM's warm-up requests may be smaller.
    dummy_tree_step(runner, runner.decode_query_len)
    times = original(self)
    calibrate(runner)
    return times
