# SPDX-License-Identifier: Apache-2.0
"""What a draft and a target's pass cost on this machine, timed once before the first request.

The steps are vLLM's dummy runs, timed by its ``StepTimingCollector``, on the captured graphs if
there are any. A dummy run of n rows has n requests. A tree's rows share one context, so the profile
has a short one: with a long one each row would look as dear as a request. Its rows get tokens of
their own, because equal tokens would visit the same few experts. The output head, which every
verified row passes and vLLM's marks leave out, is added.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_world_group

from vllm_bastion import envs
from vllm_bastion.config import BastionSpeculativeConfig, settings_of
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost import Estimator, ModelShape, device_spec

logger = init_logger(__name__)

# Rows to time without graphs. Times rise by steps, most of them below 32 rows.
_ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256, 512)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
# Cached tokens of a dummy request.
_CONTEXT = 16
# Runs of each size on a GPU; seconds that all sizes may take on a CPU.
_RUNS, _SECONDS = 5, 2.0

Curve = list[tuple[int, float]]


@torch.inference_mode()
def profile(runner: Any) -> None:
    """Time the steps of `runner`, a ``GPUModelRunner``, and log the engine's choices. Collective.

    An engine with a fixed budget is not timed.
    """
    config, runtime = settings_of(runner.vllm_config), runtime_of(runner.vllm_config)
    start = time.perf_counter()
    if config.bastion_budget == "adaptive":
        timed = _time_on_gpu if current_host().runs_ahead else _time_on_cpu
        draft_ms, verify_ms = timed(runner)
        runner.adaptive_verification.set_cost_curves(draft_ms, verify_ms)
        if config.bastion_latency_model != "profile":
            runner.adaptive_verification.estimator = _estimator(runner, config, verify_ms)
    runtime.records = envs.telemetry()
    if get_world_group().rank_in_group == 0:
        logger.info("%s", _summary(runner, time.perf_counter() - start))
        if (warning := current_host().warning()) is not None:
            logger.warning("%s", warning)


def _estimator(runner: Any, config: BastionSpeculativeConfig, verify_ms: Curve) -> Estimator:
    """The paper's estimator that the user named, from rank 0's device and times."""
    model = runner.vllm_config.model_config
    try:
        shape = ModelShape.from_config(
            model.hf_text_config,
            bytes_per_element=model.dtype.itemsize,
            tp=runner.parallel_config.tensor_parallel_size,
        )
    except ValueError as error:
        raise ValueError(
            f'"bastion_latency_model": "{config.bastion_latency_model}" needs a roofline of the '
            f'target, and there is none ({error}): use "profile"'
        ) from error
    group = get_world_group()
    own = (device_spec(runner.device, model.dtype), verify_ms)
    device, samples = group.broadcast_object(own, src=0) if group.world_size > 1 else own
    sizes = _captured(runner)
    name: Any = config.bastion_latency_model
    return Estimator(name, shape, device, samples, runner.max_num_tokens, _CONTEXT, sizes)


def _time_on_gpu(runner: Any) -> tuple[Curve, Curve]:
    """ms of drafts by requests, and of passes by rows, at the sizes of vLLM's graphs and beyond."""
    manager, forward, draft = runner.adaptive_verification, defaultdict(list), defaultdict(list)
    sizes = _captured(runner)
    rows = sizes + _beyond(sizes, runner.max_num_tokens)
    manager._cudagraph_limit = sizes[-1] if sizes else 1
    with runner.step_timing.collect() as samples:
        for size in rows:
            for _ in range(_RUNS):
                tree_step(runner, size)
    for sample in samples:
        forward[sample.num_target_tokens].append(sample.forward_ms)
        # Beyond the graphs the host launches the target's kernels while the drafter's marks run.
        if sample.full_cudagraph or not sizes:
            draft[sample.num_reqs].append(sample.drafter_ms)
    heads = _heads(runner, [n for n in rows if n <= manager.max_total_logits] or rows[:1])
    return _medians(draft), [(n, ms + heads(n)) for n, ms in _medians(forward)]


def _captured(runner: Any) -> list[int]:
    """Token counts of the FULL graphs, ascending; empty without graphs."""
    manager = runner.cudagraph_manager
    return [] if manager is None else list(manager.captured_token_counts())


def _beyond(sizes: list[int], most: int) -> list[int]:
    """A few sizes beyond the largest graph, where steps run without; all sizes without graphs."""
    if not sizes:
        return [n for n in _ROWS if n <= most]
    found = [min(sizes[-1] + 1, most)]
    while found[-1] < most and len(found) < 4:
        found.append(min(2 * found[-1], most))
    return [n for n in found if n > sizes[-1]]


def _time_on_cpu(runner: Any) -> tuple[Curve, Curve]:
    """The same within `_SECONDS`: as many sizes, the smaller ones first, as there is time for.

    oneDNN compiles a product for each new number of rows, so a size's first run does not count.
    Ranks run the same sizes: rank 0 says how long each has taken.
    """
    manager = runner.adaptive_verification
    manager._cudagraph_limit = 1  # costs between two sizes are interpolated
    rows = [n for n in _ROWS if n <= min(runner.max_num_tokens, manager.max_total_logits)]
    most_reqs = min(
        runner.max_num_reqs, runner.max_num_tokens // runner.speculator.num_query_per_req
    )
    reqs = [n for n in _REQUESTS if n <= max(most_reqs, 1)]

    def forward(size: int) -> float:
        with _without_drafter(runner):
            start = time.perf_counter()
            tree_step(runner, size)
        runner.model.compute_logits(head_input(runner, size))
        return (time.perf_counter() - start) * 1e3

    def draft(size: int) -> float:
        # vLLM's marks are stubs on a CPU.
        propose, taken = runner.speculator.propose, list[float]()

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            drafted = propose(*args, **kwargs)
            taken.append((time.perf_counter() - start) * 1e3)
            return drafted

        runner.speculator.propose = timed
        try:
            tree_step(runner, size)
        finally:
            del runner.speculator.propose
        return taken[0]

    verify_ms = _timed(forward, rows, 0.7 * _SECONDS)
    return _timed(draft, reqs, 0.3 * _SECONDS), verify_ms


def _timed(run: Callable[[int], float], sizes: Sequence[int], seconds: float) -> Curve:
    """Median ms of each size, as far as the time goes; the first one in any case."""
    group, found = get_world_group(), defaultdict(list)
    spent, rounds = 0.0, 0
    todo = list(sizes)
    while todo and rounds < _RUNS:
        for i, size in enumerate(todo):
            start = time.perf_counter()
            if rounds == 0:
                run(size)
            found[size].append(run(size))
            spent += time.perf_counter() - start
            spent = group.broadcast_object(spent, src=0) if group.world_size > 1 else spent
            if spent > seconds and (rounds or i or spent > 2 * seconds):
                return _medians(found)
        rounds += 1
    return _medians(found)


def _medians(samples: dict[int, list[float]]) -> Curve:
    return [(size, median(times)) for size, times in sorted(samples.items())]


@contextmanager
def _without_drafter(runner: Any) -> Iterator[None]:
    speculator, runner.speculator = runner.speculator, None
    try:
        yield
    finally:
        runner.speculator = speculator


def tree_step(runner: Any, rows: int) -> None:
    """Run a dummy batch as a tree step runs: with the attention kernel that reads the mask."""
    runtime = runtime_of(runner.vllm_config)
    runtime.profiles = runner.cudagraph_manager.profiles = True
    try:
        runner._dummy_run(rows, context_len=_CONTEXT, skip_eplb=True)
    finally:
        runtime.profiles = runner.cudagraph_manager.profiles = False


def head_input(runner: Any, rows: int) -> torch.Tensor:
    """All-zero hidden states [rows, H] for the target's output head."""
    if runner.lora_config is not None:
        # The head may have adapters. vLLM's CPU ops need an entry for each row.
        runner._set_active_loras((0,) * rows, (0,) * rows, set())
    config = runner.model_config
    return torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype, device=runner.device)


def _heads(runner: Any, sizes: Sequence[int]) -> Callable[[int], float]:
    """ms of the target's output head by rows, from some of `sizes`, on a GPU."""
    few = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    times = []
    for rows in few:
        hidden, marks = head_input(runner, rows), []
        for _ in range(1 + _RUNS):
            marks.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            marks[-1][0].record()
            runner.model.compute_logits(hidden)
            marks[-1][1].record()
        marks[-1][1].synchronize()
        times.append(median(start.elapsed_time(end) for start, end in marks[1:]))
    return lambda rows: float(np.interp(rows, few, times))


def _summary(runner: Any, seconds: float) -> str:
    """One line on what was chosen."""
    config, trees = settings_of(runner.vllm_config), runtime_of(runner.vllm_config).trees
    drafter = "+".join(config.draft_model_config.hf_config.architectures)
    budget = config.bastion_budget
    timed = f", step costs timed in {seconds:.1f} s" if budget == "adaptive" else ""
    choices = current_host().choices(
        config.bastion_drafter_weights, runner.vllm_config.model_config.dtype
    )
    return "; ".join(
        (
            f"Bastion: {drafter}, gamma {config.bastion_gamma}, {trees.top_k} candidates, at most "
            f"{config.num_speculative_tokens} nodes, budget {budget}{timed}",
            *choices,
        )
    )
