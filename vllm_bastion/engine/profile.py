# SPDX-License-Identifier: Apache-2.0
"""What a draft and a target's pass cost on this machine, timed once before the first request.

The steps are vLLM's dummy runs, on the captured graphs if there are any. A dummy run of n rows has
n requests, but a tree's rows share one context: with a long context each row would cost as much as
a request, so the profile's is short. Its tokens are random, because equal ones would be routed to
the same few experts. The output head, which every verified row passes, is part of a pass.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from scipy.optimize import isotonic_regression
from vllm.distributed.parallel_state import get_world_group

from vllm_bastion import envs
from vllm_bastion.config import BastionSpeculativeConfig, settings_of
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost import Estimator, ModelShape, device_spec

logger = init_logger(__name__)

# Rows to time without graphs: all runs of a group, then the next one's. A few sizes far apart say
# more than many that were timed once: by noise alone, 64 rows can then seem to cost what 8 do. The
# 17th row opens a second tile of AMX registers, which costs a quarter more.
_ROWS = ((1, 64, 16, 128, 17), (4, 32, 48, 256), (2, 8, 24, 33, 512))
# Cached tokens of a dummy request.
_CONTEXT = 16
# Runs of each size that count; seconds that all sizes may take on a CPU.
_RUNS, _SECONDS = 4, 2.8

Curve = list[tuple[int, float]]


@torch.inference_mode()
def profile(runner: Any) -> None:
    """Time the steps of `runner`, a ``GPUModelRunner``, and log the engine's choices. Collective.

    An engine with a fixed budget is not timed.
    """
    config, runtime = settings_of(runner.vllm_config), runtime_of(runner.vllm_config)
    start = time.perf_counter()
    if config.bastion_budget == "adaptive":
        draft_ms, verify_ms = _time(runner)
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
    own = (device_spec(runner.device, model.dtype), verify_ms)
    device, samples = get_world_group().broadcast_object(own, src=0)
    sizes = _captured(runner)
    name: Any = config.bastion_latency_model
    return Estimator(name, shape, device, samples, runner.max_num_tokens, _CONTEXT, sizes)


def _time(runner: Any) -> tuple[Curve, Curve]:
    """ms of drafts by requests, and of passes by rows, at the sizes of vLLM's graphs and beyond.

    A size's first run does not count: a CPU compiles products for each new number of rows. There as
    many sizes are timed as `_SECONDS` allow; for all ranks, rank 0 says when that is.
    """
    sizes, manager = _captured(runner), runner.adaptive_verification
    most = min(runner.max_num_tokens, manager.max_total_logits)
    first, *others = _ROWS
    capped = list(dict.fromkeys(min(n, most) for n in first))
    groups = [capped, *([n for n in own if n <= most and n not in capped] for own in others)]
    if sizes:
        beyond = {min((sizes[-1] + 1) << i, runner.max_num_tokens) for i in range(4)}
        groups = [sorted(beyond.union(sizes))]
    runs: list[int] = []
    for group in groups:
        runs += [n for n in group for _ in range(2)] + group * (_RUNS - 1)
    # Without graphs, costs between two sizes are interpolated.
    manager._cudagraph_limit = sizes[-1] if sizes else 1
    timing, started = _Timing(runner), time.perf_counter()
    own, runner.step_timing = runner.step_timing, timing
    try:
        for i, size in enumerate(runs):
            tree_step(runner, size)
            if not current_host().runs_ahead and i:
                spent = get_world_group().broadcast_object(time.perf_counter() - started, src=0)
                if spent > _SECONDS:
                    break
    finally:
        runner.step_timing = own
    forward, draft = defaultdict(list), defaultdict(list)
    seen: set[int] = set()
    for full_graph, size, reqs, marks in timing.steps():
        if size in seen:
            forward[size].append(marks[0].elapsed_time(marks[1]))
            if full_graph or not sizes:  # beyond the graphs, launches open gaps between marks
                draft[reqs].append(marks[2].elapsed_time(marks[3]))
        seen.add(size)
    return _curve(draft), _curve(forward)


class _Mark:
    """As much of a CUDA event as `_Timing` uses, on the host's clock."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: _Mark) -> float:
        return (end.time - self.time) * 1e3

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Timing:
    """Replaces vLLM's ``StepTimingCollector``, whose marks are stubs on a CPU."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # Whether it is a FULL graph, rows, requests, and marks around the pass and the draft.
        self._steps: list[tuple[bool, int, int, list[Any]]] = []

    def record_batch(self, batch: Any, full_graph: bool) -> None:
        self._steps.append((full_graph, batch.num_tokens, batch.num_reqs, []))

    def _mark(self) -> None:
        ahead = current_host().runs_ahead
        mark: Any = torch.cuda.Event(enable_timing=True) if ahead else _Mark()
        mark.record()
        self._steps[-1][-1].append(mark)

    forward_start = drafter_start = drafter_end = _mark

    def forward_end(self) -> None:
        """The pass ends with the target's output head."""
        rows = min(self._steps[-1][1], self._runner.adaptive_verification.max_total_logits)
        self._runner.model.compute_logits(head_input(self._runner, rows))
        self._mark()

    def steps(self) -> list[tuple[bool, int, int, list[Any]]]:
        """All of them, once the device has done the last one."""
        self._steps[-1][-1][-1].synchronize()
        return self._steps


def _captured(runner: Any) -> list[int]:
    """Token counts of the FULL graphs, ascending; empty without graphs."""
    manager = runner.cudagraph_manager
    return [] if manager is None else list(manager.captured_token_counts())


def _curve(samples: dict[int, list[float]]) -> Curve:
    """The medians; where a larger size seems cheaper, their mean (isotonic regression)."""
    medians = {size: median(samples[size]) for size in sorted(samples)}
    return list(zip(medians, isotonic_regression([*medians.values()]).x.tolist(), strict=True))


def tree_step(runner: Any, rows: int) -> None:
    """Run a dummy batch as a tree step runs: with the attention kernel that reads the mask."""
    runtime = runtime_of(runner.vllm_config)
    runtime.profiles = runner.cudagraph_manager.profiles = True
    try:
        runner._dummy_run(rows, context_len=_CONTEXT, skip_eplb=True, randomize_inputs=True)
    finally:
        runtime.profiles = runner.cudagraph_manager.profiles = False


def head_input(runner: Any, rows: int) -> torch.Tensor:
    """All-zero hidden states [rows, H] for the target's output head."""
    if runner.lora_config is not None:
        # The head may have adapters. vLLM's CPU ops need an entry for each row.
        runner._set_active_loras((0,) * rows, (0,) * rows, set())
    config = runner.model_config
    return torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype, device=runner.device)


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
