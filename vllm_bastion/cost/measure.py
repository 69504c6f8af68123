# SPDX-License-Identifier: Apache-2.0
"""Time what a step costs on a finished engine, before the first request.

Two kinds of steps, both timed by vLLM's own ``StepTimingCollector`` and replaying the captured
graphs where there are any: vLLM's dummy runs, a row for each of as many requests as fit (plain
decoding), and trees of a few requests (`TreeSteps`). The output head, which a verified node also
passes, is added to the forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import StepTimingCollector, StepTimingEvents

from vllm_bastion.cost.agreement import of_rank_0
from vllm_bastion.cost.calibration import calibrate_and_report
from vllm_bastion.cost.forward_times import Sample
from vllm_bastion.cost.roofline import Roofline
from vllm_bastion.cost.store import Profile, ProfileKey
from vllm_bastion.cost.table import StepCostTable, padded_rows
from vllm_bastion.cost.timing import HostMark, new_mark
from vllm_bastion.cost.tree_steps import TreeSteps
from vllm_bastion.logger import init_logger
from vllm_bastion.step.runtime import runtime_of

logger = init_logger(__name__)

# A point is timed so often, if that takes no longer than `_POINT_S` seconds; once at least.
_REPEATS = 5
_POINT_S = 0.2
# Trees whose step takes longer are timed over the shortest context only.
_SLOW_S = 0.3
# Sizes timed where there are no graphs to name them, and contexts (cached tokens per request). A
# matrix unit's tile is 16 rows: one row more can cost what 16 do, so both sides are timed.
_EAGER_ROWS = (
    1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 49, 64, 65, 96, 128, 192, 256, 384, 512, 768, 1024,
)  # fmt: skip
CONTEXTS = (128, 2048, 8192)
# Batches whose context is timed: decoding plainly, and with trees.
_PLAIN_REQS = (1, 4, 16, 64, 256)
_TREE_REQS = (1, 4, 16)


class HostStepTimingCollector(StepTimingCollector):
    """vLLM's collector of step timings for a CPU engine: host marks, not its event stubs."""

    def forward_start(self) -> None:
        if self._collecting:
            self._step = StepTimingEvents(HostMark(), HostMark(), HostMark(), HostMark())
            self._step.forward_start.record()


def measure(
    runner: Any, key: ProfileKey, roofline: Roofline | None, captured: list[int], group: Any
) -> Profile:
    """Time the engine of `runner` and fit the roofline to it; its steps are `group`'s together."""
    start = time.perf_counter()
    if runner.device.type == "cpu":
        runner.step_timing = HostStepTimingCollector()
    room, batches, contexts = _room(runner), _batches(runner), _contexts(runner)
    shapes = tree_shapes(_largest_tree(runner), room, batches[-1])
    # Each size of a tree step is timed without context as well.
    padded = padded_rows(runner.max_num_tokens, captured)
    sizes = sorted(
        {
            *sizes_to_measure(captured, runner.max_num_tokens),
            *(int(padded[reqs * (1 + n)]) for reqs, n in shapes),
        }
    )

    heads = [_head_ms(runner, n, group) for n in sizes]

    def head_ms(rows: int) -> float:
        return float(np.interp(rows, sizes, heads))

    plain = _dummy_steps(runner, sizes, 0, group)
    for context in contexts:
        plain += _dummy_steps(runner, batches, context, group)
    samples: list[Sample] = []
    drafter: list[tuple[int, float]] = []
    for context, step in plain:
        rows = step.num_target_tokens
        samples.append((rows, float(context), step.forward_ms + head_ms(rows), step.num_reqs))
        drafter.append((step.num_reqs, step.drafter_ms))
    of_drafter = StepCostTable(samples, drafter, max_rows=1).drafter_ms

    beyond: list[list[float]] = [[], []]  # of a step without trees, and with
    for context, roots, verified in _tree_steps(runner, shapes, contexts, group):
        rows, reqs = int(padded[verified.num_target_tokens]), verified.num_reqs
        samples.append((rows, float(context), verified.forward_ms + head_ms(rows), reqs))
        for times, step in zip(beyond, (roots, verified), strict=True):
            times.append(step.drafter_ms - of_drafter(reqs) - head_ms(step.num_target_tokens))
    plain_aux_ms, aux_ms = (max(0.0, median(times)) if times else 0.0 for times in beyond)

    table = StepCostTable(
        samples,
        drafter,
        aux_ms,
        plain_aux_ms=plain_aux_ms,
        max_rows=runner.max_num_tokens,
        captured_sizes=captured,
    )
    report = calibrate_and_report(roofline, samples) if roofline else None
    error = ""
    if report is not None:
        error = f"; roofline error {report.rmse_before:.2f} -> {report.rmse_after:.2f} ms"
    logger.info(
        "Measured the cost of a step at %d sizes, and of trees at %d shapes x %d contexts, in "
        "%.1f s%s",
        len(sizes),
        len(shapes),
        len(contexts),
        time.perf_counter() - start,
        error,
    )
    return Profile.from_measurement(key, table, report)


def warm_up(runner: Any) -> None:
    """Run a step with the largest tree: what that compiles a CPU's first request would wait for."""
    nodes = min(_largest_tree(runner), _room(runner) - 1)
    if nodes > 0:
        with TreeSteps(runner).as_asked() as steps:
            steps.run(1, nodes, 1)


def largest_steps(runner: Any, captured: list[int]) -> tuple[int, int, int]:
    """Requests, rows and cached tokens of the largest steps that `measure` times."""
    rows = sizes_to_measure(captured, runner.max_num_tokens)
    return _batches(runner)[-1], rows[-1], _contexts(runner)[-1]


def _batches(runner: Any) -> list[int]:
    # A drafter's block of each request must fit, too.
    depth = runtime_of(runner.vllm_config).trees.depth
    most = max(1, min(runner.max_num_tokens // (1 + depth), runner.max_num_reqs))
    return [reqs for reqs in _PLAIN_REQS if reqs <= most]


def _contexts(runner: Any) -> list[int]:
    depth = runtime_of(runner.vllm_config).trees.depth
    longest = max(1, runner.max_model_len - depth - 3 - _largest_tree(runner))
    return sorted({min(context, longest) for context in CONTEXTS})


def _room(runner: Any) -> int:
    """Most rows of a step that verifies trees."""
    return min(runner.max_num_tokens, runner.adaptive_verification.max_total_logits)


def _largest_tree(runner: Any) -> int:
    # A request has its context, two roots, the tree, and what is accepted of it.
    trees = runtime_of(runner.vllm_config).trees
    return min(trees.tree_size, runner.max_model_len - trees.depth - 4)


def sizes_to_measure(captured: list[int], max_rows: int) -> list[int]:
    """Rows to time: every captured size, and beyond the last one, where steps run without graphs.

    Leaving graphs is a jump that no extrapolation finds, so the tail starts right behind it.
    """
    if not captured:
        return [n for n in _EAGER_ROWS if n <= max_rows]
    sizes = list(captured)
    beyond = captured[-1] + captured[-1] // 8
    while beyond < max_rows and len(sizes) < len(captured) + 4:
        sizes.append(beyond)
        beyond *= 2
    return [n for n in sizes if n <= max_rows]


def tree_shapes(nodes: int, max_rows: int, max_reqs: int) -> list[tuple[int, int]]:
    """(requests, nodes of each) to time: a few batches, trees from few nodes to the largest."""
    per_request = sorted({*(2**i - 1 for i in range(2, 10) if 2**i <= nodes), nodes})
    return [
        (reqs, n)
        for reqs in _TREE_REQS
        for n in per_request
        if n >= 1 and reqs <= max_reqs and reqs * (1 + n) <= max_rows
    ]


def _dummy_steps(runner: Any, sizes: list[int], context: int, group: Any) -> list[tuple[int, Any]]:
    """(context, vLLM's timing) of each dummy run of that many rows."""
    # The first use of a shape is no measurement.
    first = [_seconds(partial(dummy_tree_step, runner, rows, context)) for rows in sizes]
    # Every rank must run the same steps.
    counts = of_rank_0(group, lambda: [repeats_after(seconds) for seconds in first])
    with runner.step_timing.collect() as timings:
        for rows, count in zip(sizes, counts, strict=True):
            for _ in range(count):
                dummy_tree_step(runner, rows, context)
    return [(context, timing) for timing in timings]


def repeats_after(seconds: float) -> int:
    """How often to time what took so long at first."""
    return max(1, min(_REPEATS, int(_POINT_S / max(seconds, 1e-9))))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def dummy_tree_step(runner: Any, rows: int, context: int = 0) -> None:
    """Run a dummy batch as a step with trees is run: on the kernel that reads the mask."""
    trees = runtime_of(runner.vllm_config).trees
    trees.always_masking = True
    try:
        runner._dummy_run(rows, context_len=context, skip_eplb=True)
    finally:
        trees.always_masking = False


def _tree_steps(
    runner: Any, shapes: list[tuple[int, int]], contexts: list[int], group: Any
) -> list[tuple[int, Any, Any]]:
    """(context, vLLM's timing of the roots' step, and of the trees') of each repetition."""
    if not shapes:
        return []
    with TreeSteps(runner).as_asked() as steps:
        # as above; two steps each
        own = [_seconds(partial(steps.run, *shape, contexts[0])) / 2 for shape in shapes]
        first = of_rank_0(group, lambda: own)
        points = [
            (*shape, context)
            for context in contexts
            for shape, seconds in zip(shapes, first, strict=True)
            if context == contexts[0] or seconds <= _SLOW_S
            for _ in range(repeats_after(seconds))
        ]
        with runner.step_timing.collect() as timings:
            for reqs, nodes, context in points:
                steps.run(reqs, nodes, context)
    return [
        (context, roots, verified)
        for (_, _, context), roots, verified in zip(
            points, timings[::2], timings[1::2], strict=True
        )
    ]


def _head_ms(runner: Any, rows: int, group: Any) -> float:
    """Median milliseconds of the target's output head over `rows` rows."""
    hidden = torch.zeros(
        rows,
        runner.model_config.get_hidden_size(),
        dtype=runner.model_config.dtype,
        device=runner.device,
    )
    times: list[float] = []

    def once() -> None:
        start, end = new_mark(runner.device), new_mark(runner.device)
        start.record()
        runner.model.compute_logits(hidden)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))

    first = _seconds(once)
    for _ in range(of_rank_0(group, lambda: repeats_after(first)) - 1):
        once()
    return median(times)
