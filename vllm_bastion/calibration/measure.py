# SPDX-License-Identifier: Apache-2.0
"""Time what a step costs on a finished engine, before the first request.

Two kinds of steps are timed, by vLLM's own ``StepTimingCollector`` and on the captured graphs if
there are any: vLLM's dummy runs, one row for each of as many requests as fit (plain decoding), and
trees of a few requests (`TreeSteps`). The output head, which each verified node passes too, is
added to the forward pass.

Decisions depend on how the times of sizes compare, and a host's memory can be slow for seconds at a
time. So every size is timed once before any is timed again: a slow period then affects all sizes.

Beyond the captured graphs the host launches kernels one by one, and may be slower than the device.
The device must be idle when such a step is timed: earlier work would hide the host's time, which
counts when such steps follow each other.

Ranks that step together run the same steps and use rank 0's numbers. `group` is their
``GroupCoordinator`` of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_bastion.calibration.points import REPEATS, Limits, sizes_to_measure, tree_shapes
from vllm_bastion.calibration.tree_steps import TreeSteps
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost.devices import device_spec
from vllm_bastion.policy.cost.forward_times import Sample
from vllm_bastion.policy.cost.paper import ModelShape, Roofline, calibrate
from vllm_bastion.policy.cost.table import StepCostTable, padded_rows
from vllm_bastion.policy.cost.timing import new_mark

logger = init_logger(__name__)

# Trees whose step takes longer are timed with the shortest context only.
_SLOW_S = 0.3
# No size is timed again once all timed steps took this many seconds.
_MEASURE_S = 3.0
# Seconds that `warm_up` may take, beyond the largest tree.
_WARM_UP_S = 2.0

T = TypeVar("T")
# (rows, cached tokens) of a plain step; (requests, nodes of each, cached tokens) of a tree step
Points = list[tuple[int, ...]]


def from_rank_0(group: Any, value: Callable[[], T]) -> T:
    """Rank 0's `value()`, on every rank; the other ranks do not call it."""
    own = value() if group.rank_in_group == 0 else None
    answer: T = group.broadcast_object(own, src=0)
    return answer


def measure(runner: Any, captured: list[int], group: Any) -> StepCostTable:
    """Time the engine of `runner`. Collective within `group`.

    Args:
        runner: the ``GPUModelRunner``.
        captured: captured sizes, ascending.
        group: the ranks that step together.

    Returns:
        The costs. Its carrier is the roofline fitted to them, None if the target has none.
    """
    current_host().prepare_timing(runner)
    limits = limits_of(runner)
    batches, (near, *far) = limits.batch_sizes, limits.contexts
    largest_graph = max(captured, default=runner.max_num_tokens)
    shapes = tree_shapes(limits.largest_tree, _max_tree_rows(runner), batches[-1])
    # The sizes of tree steps are timed without context, too.
    padded = padded_rows(runner.max_num_tokens, captured)
    sizes = sorted(
        {
            *sizes_to_measure(captured, runner.max_num_tokens),
            *(int(padded[reqs * (1 + n)]) for reqs, n in shapes),
        }
    )
    # No step has more logits, and memory for more was not profiled.
    heads = [n for n in sizes if n <= _max_tree_rows(runner)] or sizes[:1]
    steps: Points = [(n, context) for context in (near, *far) for n in batches]
    steps += [(n, 0) for n in sizes]
    spared = limits.depth - 1
    short: Points = [(n, near) for n in batches] if may_stop_early(runner) else []

    # The first run of a size may compile, and is not a measurement.
    for n in heads:
        _head_ms(runner, n)
    for rows, context in steps:
        dummy_tree_step(runner, rows, context)
    for rows, context in short:
        dummy_tree_step(runner, rows, context, spared)
    tree_points = _tree_points(runner, shapes, near, far, group)

    head_times: dict[int, list[float]] = {n: [] for n in heads}
    plain: list[tuple[int, Any]] = []
    trees: list[tuple[int, Any, Any]] = []
    drafts: list[tuple[int, Any]] = []
    start = time.perf_counter()
    for _ in range(REPEATS):
        for n in heads:
            head_times[n].append(_head_ms(runner, n))
        plain += _dummy_steps(runner, steps, largest_graph)
        drafts += _dummy_steps(runner, short, largest_graph, spared=spared)
        trees += _tree_steps(runner, tree_points, largest_graph)
        if from_rank_0(group, lambda: time.perf_counter() > start + _MEASURE_S):
            break

    def head_ms(rows: int) -> float:
        return float(np.interp(rows, heads, [median(head_times[n]) for n in heads]))

    def costs() -> dict[str, Any]:
        samples: list[Sample] = [
            (rows, float(context), step.forward_ms + head_ms(rows), step.num_reqs)
            for rows, context, step in (
                *((step.num_target_tokens, context, step) for context, step in plain),
                *((int(padded[step.num_target_tokens]), c, step) for c, _, step in trees),
            )
        ]
        drafter = [(step.num_reqs, step.drafter_ms) for _, step in plain]
        drafter_ms = StepCostTable(samples, drafter, max_rows=1).drafter_ms
        positions = [
            (step.num_reqs, max(0.0, drafter_ms(step.num_reqs) - step.drafter_ms) / max(1, spared))
            for _, step in drafts
        ]
        aux_times: list[list[float]] = [[], []]  # of plain steps, and of tree steps
        for _, roots, verified in trees:
            for times, step in zip(aux_times, (roots, verified), strict=True):
                head = head_ms(step.num_target_tokens)
                times.append(step.drafter_ms - drafter_ms(verified.num_reqs) - head)
        plain_aux_ms, aux_ms = (max(0.0, median(times)) if times else 0.0 for times in aux_times)
        roofline = _roofline(runner)
        return {
            "samples": samples,
            "drafter_samples": drafter,
            "aux_ms": aux_ms,
            "plain_aux_ms": plain_aux_ms,
            "position_samples": positions,
            "carrier": None if roofline is None else calibrate(roofline, samples),
        }

    numbers = from_rank_0(group, costs)
    return StepCostTable(**numbers, max_rows=runner.max_num_tokens, captured_sizes=captured)


def _roofline(runner: Any) -> Roofline | None:
    """The target's bare roofline on this device; None if the target is not a dense decoder."""
    model_config = runner.vllm_config.model_config
    try:
        shape = ModelShape.from_config(
            model_config.hf_text_config,
            bytes_per_element=model_config.dtype.itemsize,
            tp=runner.parallel_config.tensor_parallel_size,
        )
    except ValueError as error:
        logger.warning("No roofline for this target (%s): step costs are measured ones only", error)
        return None
    return Roofline(shape, device_spec(runner.device, model_config.dtype))


def warm_up(runner: Any, group: Any) -> None:
    """Run a tree of every size, so that a CPU's first requests do not wait. Collective in `group`.

    oneDNN compiles a matrix product for every new number of rows. The largest tree is first; slow
    models, whose steps hide that time, run as many of the others as `_WARM_UP_S` allows.
    """
    largest = min(limits_of(runner).largest_tree, _max_tree_rows(runner) - 1)
    if largest < 1:
        return
    with TreeSteps(runner).untrimmed() as steps:
        own = _seconds(partial(steps.run, 1, largest, 1))
        own = min(own, _seconds(partial(steps.run, 1, largest, 1)))
        seconds = from_rank_0(group, lambda: own)
        for nodes in range(1, min(largest, 1 + int(_WARM_UP_S / seconds))):
            steps.run(1, nodes, 1)


def may_stop_early(runner: Any) -> bool:
    """Whether drafts may differ in depth. On a GPU they cannot: the captured graph has all rows."""
    return runner.speculator.may_stop_early and not current_host().runs_ahead


def limits_of(runner: Any) -> Limits:
    """The limits of an engine's steps."""
    trees = runtime_of(runner.vllm_config).trees
    sizes = runner.max_num_tokens, runner.max_num_reqs, runner.max_model_len
    return Limits(*sizes, trees.gamma, trees.tree_size)


def _max_tree_rows(runner: Any) -> int:
    """Most rows of a step that verifies trees."""
    return min(runner.max_num_tokens, runner.adaptive_verification.max_total_logits)


def _tree_points(
    runner: Any, shapes: list[tuple[int, int]], near: int, far: list[int], group: Any
) -> Points:
    """The (requests, nodes of each, context) to time. Runs each shape once first."""
    if not shapes:
        return []
    with TreeSteps(runner).untrimmed() as steps:
        own = [_seconds(partial(steps.run, *shape, near)) for shape in shapes]
    # `run` runs two steps. Every rank must run the same ones.
    seconds = [both / 2 for both in from_rank_0(group, lambda: own)]
    quick = [shape for shape, s in zip(shapes, seconds, strict=True) if s <= _SLOW_S]
    return [
        *((*shape, near) for shape in shapes),
        *((*shape, context) for context in far for shape in quick),
    ]


def _dummy_steps(
    runner: Any, points: Points, largest_graph: int, spared: int = 0
) -> list[tuple[int, Any]]:
    """Run a dummy step of each (rows, context). Returns (context, vLLM's timing) of each."""
    with runner.step_timing.collect() as timings:
        for rows, context in points:
            if rows > largest_graph:
                torch.accelerator.synchronize()
            dummy_tree_step(runner, rows, context, spared)
    return [(context, timing) for (_, context), timing in zip(points, timings, strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def dummy_tree_step(runner: Any, rows: int, context: int = 0, spared: int = 0) -> None:
    """Run a dummy batch as a tree step runs: with the attention kernel that reads the mask.

    spared: positions at the end of each block that are not predicted.
    """
    runtime = runtime_of(runner.vllm_config)
    runtime.timed_spares = spared
    try:
        runner._dummy_run(rows, context_len=context, skip_eplb=True)
    finally:
        runtime.timed_spares = None


def _tree_steps(runner: Any, points: Points, largest_graph: int) -> list[tuple[int, Any, Any]]:
    """Run each (requests, nodes, context). Returns (context, timing of roots, timing of trees)."""
    if not points:
        return []
    with TreeSteps(runner).untrimmed() as steps, runner.step_timing.collect() as timings:
        for reqs, nodes, context in points:
            steps.run(reqs, nodes, context, wait=reqs * (1 + nodes) > largest_graph)
    return [
        (context, roots, verified)
        for (_, _, context), roots, verified in zip(
            points, timings[::2], timings[1::2], strict=True
        )
    ]


def head_input(runner: Any, rows: int) -> torch.Tensor:
    """All-zero hidden states [rows, H] for the target's output head."""
    if runner.lora_config is not None:
        # The head may have adapters. vLLM's CPU ops need an entry for each row.
        runner._set_active_loras((0,) * rows, (0,) * rows, set())
    config = runner.model_config
    return torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype, device=runner.device)


def _head_ms(runner: Any, rows: int) -> float:
    """Milliseconds of the target's output head over `rows` rows."""
    hidden = head_input(runner, rows)
    start, end = new_mark(runner.device), new_mark(runner.device)
    start.record()
    runner.model.compute_logits(hidden)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
