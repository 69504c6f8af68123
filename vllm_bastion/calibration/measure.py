# SPDX-License-Identifier: Apache-2.0
"""Time what a step costs on a finished engine, before the first request.

Two kinds of steps are timed, by vLLM's own ``StepTimingCollector`` and on the captured graphs if
there are any: vLLM's dummy runs, one row for each of as many requests as fit (plain decoding), and
trees of a few requests (`TreeSteps`). The output head, which each verified node passes too, is
added to the forward pass.

Decisions depend on how the times of sizes compare, and a host's memory can be slow for seconds at a
time. So every size is timed once before any is timed again: a slow period then affects all sizes.
Points whose times contradict others' are timed again, see `policy.cost.doubts`.

Beyond the captured graphs the host launches kernels one by one, and may be slower than the device.
The device must be idle when such a step is timed: earlier work would hide the host's time, which
counts when such steps follow each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from vllm_bastion.calibration.agreement import from_rank_0
from vllm_bastion.calibration.load import CpuTimes
from vllm_bastion.calibration.points import (
    REPEATS,
    REPEATS_FAR,
    Limits,
    repeats_after,
    sizes_to_measure,
    tree_shapes,
)
from vllm_bastion.calibration.tree_steps import TreeSteps
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost.doubts import Point, doubts, settled
from vllm_bastion.policy.cost.forward_times import Sample
from vllm_bastion.policy.cost.paper import Roofline, calibrate_and_report
from vllm_bastion.policy.cost.store import Profile, ProfileKey
from vllm_bastion.policy.cost.table import StepCostTable, padded_rows
from vllm_bastion.policy.cost.timing import new_mark

logger = init_logger(__name__)

# Trees whose step takes longer are timed with the shortest context only.
_SLOW_S = 0.3
# Contradictory times are measured at most this many more times, for about this many seconds.
_AGAIN, _AGAIN_S = 3 * REPEATS, 10.0
# Seconds that `warm_up` may take, beyond the largest tree.
_WARM_UP_S = 2.0


def measure(
    runner: Any, key: ProfileKey, roofline: Roofline | None, captured: list[int], group: Any
) -> Profile:
    """Time the engine of `runner` and fit the roofline to it. Collective within `group`.

    Args:
        runner: the ``GPUModelRunner``.
        key: the profile's key.
        roofline: to fit; None if the target has none.
        captured: captured sizes, ascending.
        group: the ranks that step together.
    """
    start, cpus = time.perf_counter(), CpuTimes.now()
    current_host().prepare_timing(runner)
    limits = limits_of(runner)
    batches, contexts = limits.batch_sizes, limits.contexts
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

    dummies = [(n, 0) for n in sizes] + [(n, contexts[0]) for n in batches]
    far = [(n, context) for context in contexts[1:] for n in batches]
    # No step has more logits, and memory for more was not profiled.
    heads_of = [n for n in sizes if n <= _max_tree_rows(runner)] or sizes[:1]
    head_rounds = _rounds(partial(_head_ms, runner), [(n,) for n in heads_of], group)
    plain_rounds = _rounds(partial(dummy_tree_step, runner), dummies, group)
    far_rounds = _rounds(partial(dummy_tree_step, runner), far, group, REPEATS_FAR)
    plain_rounds = [near + far for near, far in zip(plain_rounds, far_rounds, strict=True)]
    short = [(n, contexts[0]) for n in batches] if may_stop_early(runner) else []
    first_only = limits.depth - 1
    short_step = partial(dummy_tree_step, runner, spared=first_only)
    short_rounds = _rounds(short_step, short, group)
    tree_rounds = _tree_rounds(runner, shapes, contexts, group)
    head_times: dict[int, list[float]] = {}
    plain: list[tuple[int, Any]] = []
    trees: list[tuple[int, Any, Any]] = []
    drafts: list[tuple[int, Any]] = []
    rounds = zip(head_rounds, plain_rounds, short_rounds, tree_rounds, strict=True)
    for heads, steps, shorts, verified_trees in rounds:
        for (n,) in heads:
            head_times.setdefault(n, []).append(_head_ms(runner, n))
        plain += _dummy_steps(runner, steps, largest_graph)
        drafts += _dummy_steps(runner, shorts, largest_graph, spared=first_only)
        trees += _tree_steps(runner, verified_trees, largest_graph)

    def head_ms(rows: int) -> float:
        return float(np.interp(rows, heads_of, [median(head_times[n]) for n in heads_of]))

    def forward_samples() -> list[Sample]:
        times = [(step.num_target_tokens, context, step) for context, step in plain]
        times += [
            (int(padded[step.num_target_tokens]), context, step) for context, _, step in trees
        ]
        return [
            (rows, float(context), step.forward_ms + head_ms(rows), step.num_reqs)
            for rows, context, step in times
        ]

    deadline = time.perf_counter() + _AGAIN_S
    for _ in range(_AGAIN):
        found = {doubt.point for doubt in doubts(forward_samples())}
        more = from_rank_0(group, partial(_again, found, plain, trees, padded, deadline))
        if more is None:
            break
        plain += _dummy_steps(runner, more[0], largest_graph)
        trees += _tree_steps(runner, more[1], largest_graph)

    samples = forward_samples()
    drafter = [(step.num_reqs, step.drafter_ms) for _, step in plain]
    drafter_ms = StepCostTable(samples, drafter, max_rows=1).drafter_ms
    positions = [
        (step.num_reqs, max(0.0, drafter_ms(step.num_reqs) - step.drafter_ms) / max(1, first_only))
        for _, step in drafts
    ]

    aux_times: list[list[float]] = [[], []]  # of plain steps, and of tree steps
    for _, roots, verified in trees:
        for times, step in zip(aux_times, (roots, verified), strict=True):
            head = head_ms(step.num_target_tokens)
            times.append(step.drafter_ms - drafter_ms(verified.num_reqs) - head)
    plain_aux_ms, aux_ms = (max(0.0, median(times)) if times else 0.0 for times in aux_times)

    table = StepCostTable(
        samples,
        drafter,
        aux_ms,
        plain_aux_ms=plain_aux_ms,
        max_rows=runner.max_num_tokens,
        captured_sizes=captured,
        position_samples=positions,
    )
    report = calibrate_and_report(roofline, settled(samples)) if roofline else None
    error = ""
    if report is not None:
        error = f"; roofline error {report.rmse_before:.2f} -> {report.rmse_after:.2f} ms"
    logger.info(
        "Measured step costs at %d sizes, and of trees of %d shapes at %d contexts, in %.1f s%s",
        len(sizes),
        len(shapes),
        len(contexts),
        time.perf_counter() - start,
        error,
    )
    config, end = runner.vllm_config, CpuTimes.now()
    names = (config.model_config.model, config.speculative_config.model)
    load = cpus.others_until(end, group.world_size) if cpus and end else 0.0
    return Profile.from_measurement(key, table, report, names, load)


def _again(
    found: set[Point],
    plain: list[tuple[int, Any]],
    trees: list[tuple[int, Any, Any]],
    padded: Any,
    deadline: float,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """The plain steps and the trees to time again, as `measure` names them; None if there are none.

    found: doubtful points. plain, trees: what was timed.
    """
    steps: set[tuple[int, ...]] = {
        (step.num_target_tokens, context)
        for context, step in plain
        if (step.num_target_tokens, context, step.num_reqs) in found
    }
    shapes: set[tuple[int, ...]] = {
        (step.num_reqs, step.num_target_tokens // step.num_reqs - 1, context)
        for context, _, step in trees
        if (int(padded[step.num_target_tokens]), context, step.num_reqs) in found
    }
    if not (steps or shapes) or time.perf_counter() > deadline:
        return None
    return sorted(steps), sorted(shapes)


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


def _rounds(
    run: Callable[..., object],
    points: Sequence[tuple[int, ...]],
    group: Any,
    most: int = REPEATS,
) -> list[list[tuple[int, ...]]]:
    """The points of each round. Runs each point once first, which is not a measurement.

    A point that takes long is in fewer rounds, see `repeats_after`; none is in more than `most`.
    """
    return _rounds_of(points, _first_seconds(run, points, group), most)


def _first_seconds(
    run: Callable[..., object], points: Sequence[tuple[int, ...]], group: Any
) -> list[float]:
    """How long each point takes on rank 0, because every rank must run the same steps."""
    own = [_seconds(partial(run, *point)) for point in points]
    return from_rank_0(group, lambda: own)


def _rounds_of(
    points: Sequence[tuple[int, ...]], seconds: Sequence[float], most: int = REPEATS
) -> list[list[tuple[int, ...]]]:
    counts = [min(repeats_after(each), most) for each in seconds]
    return [
        [point for point, count in zip(points, counts, strict=True) if turn < count]
        for turn in range(REPEATS)
    ]


def _tree_rounds(
    runner: Any, shapes: list[tuple[int, int]], contexts: list[int], group: Any
) -> list[list[tuple[int, ...]]]:
    """The (requests, nodes of each, context) points of each round."""
    if not shapes:
        return [[] for _ in range(REPEATS)]
    near = [(*shape, contexts[0]) for shape in shapes]
    with TreeSteps(runner).untrimmed() as steps:
        # `run` runs two steps
        seconds = [both / 2 for both in _first_seconds(steps.run, near, group)]
    quick = [(*each, s) for each, s in zip(shapes, seconds, strict=True) if s <= _SLOW_S]
    far = [((reqs, nodes, context), s) for context in contexts[1:] for reqs, nodes, s in quick]
    far_rounds = _rounds_of([point for point, _ in far], [s for _, s in far], REPEATS_FAR)
    return [a + b for a, b in zip(_rounds_of(near, seconds), far_rounds, strict=True)]


def _dummy_steps(
    runner: Any, points: list[tuple[int, ...]], largest_graph: int, spared: int = 0
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


def _tree_steps(
    runner: Any, points: list[tuple[int, ...]], largest_graph: int
) -> list[tuple[int, Any, Any]]:
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
