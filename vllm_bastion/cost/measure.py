# SPDX-License-Identifier: Apache-2.0
"""Measure what a step costs on this engine, or take it from a stored profile.

Runs once, after vLLM's warm-up and before the first request. The target's forward pass and the
drafter are timed by vLLM's own ``StepTimingCollector`` over vLLM's own dummy runs, which replay the
captured graphs where there are any; the output head, which a verified node also passes, is added.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker.gpu.async_utils import StepTimingCollector, StepTimingEvents

from vllm_bastion.config import BastionSpeculativeConfig, bastion_config
from vllm_bastion.cost.agreement import of_rank_0, shared_profile
from vllm_bastion.cost.calibration import calibrate_and_report
from vllm_bastion.cost.devices import device_name, device_spec
from vllm_bastion.cost.gate import DraftGate
from vllm_bastion.cost.next_step import StepCosts
from vllm_bastion.cost.online import make_latency
from vllm_bastion.cost.roofline import ModelShape, Roofline
from vllm_bastion.cost.store import (
    Profile,
    ProfileKey,
    config_hash,
    profile_path,
    read_profile,
    write_profile,
)
from vllm_bastion.cost.table import StepCostTable
from vllm_bastion.cost.timing import HostMark, new_mark
from vllm_bastion.logger import init_logger
from vllm_bastion.step.runtime import runtime_of

logger = init_logger(__name__)

_REPEATS = 5
# Sizes timed where there are no graphs to name them, and contexts (cached tokens per request).
_EAGER_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CONTEXTS = (128, 2048, 8192)


class HostStepTimingCollector(StepTimingCollector):
    """vLLM's collector of step timings for a CPU engine: host marks, not its event stubs."""

    def forward_start(self) -> None:
        if self._collecting:
            self._step = StepTimingEvents(HostMark(), HostMark(), HostMark(), HostMark())
            self._step.forward_start.record()


@torch.inference_mode()
def calibrate(runner: Any) -> None:
    """Give the engine of `runner` (a ``GPUModelRunner``) its step costs."""
    vllm_config = runner.vllm_config
    config = bastion_config(vllm_config)
    assert config is not None
    if config.bastion_budget != "adaptive":
        return
    runtime = runtime_of(vllm_config)
    key = profile_key(runner)
    # Tensor-parallel ranks, and those data-parallel ones whose steps are collective (of a mixture
    # of experts): vLLM makes data-parallel ranks of a dense model engines of their own.
    group = get_world_group()
    profile = shared_profile(
        config.bastion_calibration, key, lambda: measure(runner, key, group), group
    )
    if profile is None:
        roofline = bare_roofline(runner, group)
        table, calibrated = _prior(runner, roofline), None
    else:
        # A profile does not depend on how many rows a step may have; the table's length does.
        table = profile.table.with_max_rows(runner.max_num_tokens)
        calibrated = profile.calibrated
        roofline = calibrated.roofline if calibrated else None
    latency = make_latency(
        config.bastion_latency_model, table, roofline=roofline, calibrated=calibrated
    )
    # What one GPU learns the others do not know, and all must choose the same budget.
    alone = group.world_size == 1
    if not alone and config.bastion_latency_model in ("ema", "ema_calib"):
        raise ValueError(
            f"bastion_latency_model {config.bastion_latency_model!r} learns on each GPU by itself, "
            "and GPUs that step together must agree: use 'ema_table' or 'static'"
        )
    # A table or a curve that was asked for by name is believed as it stands, T_aux included.
    online = alone and config.bastion_latency_model.startswith("ema")
    runtime.costs = StepCosts(latency, runtime.trees, online=online)
    runtime.costs.install(1, 1.0)
    if runner.dp_size == 1:
        runtime.gate = DraftGate()


def main(target: str, drafter: str, *, output: Path | None, engine_args: Sequence[str]) -> Profile:
    """`vllm-bastion calibrate`: start the engine, let it measure itself, store the profile.

    output: file to write; None for the cache. engine_args: vLLM's own options.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-bastion calibrate"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", target, *engine_args]))
    with tempfile.TemporaryDirectory() as folder:
        # A file that does not exist is measured and written, whatever the cache holds.
        fresh = Path(folder) / "profile.json"
        given = dict(args.speculative_config or {})
        args.speculative_config = {
            "num_speculative_tokens": 64,
            **given,
            "method": "bastion",
            "model": drafter,
            "bastion_calibration": str(fresh),
        }
        engine = LLMEngine.from_engine_args(args)
        profile = read_profile(fresh)
        engine.engine_core.shutdown()
    write_profile(profile, output or profile_path(profile.key))
    return profile


def _prior(runner: Any, roofline: Roofline | None) -> StepCostTable:
    """The bare roofline as a table, for an engine that is not to be measured."""
    rows = runner.max_num_tokens
    if roofline is None:
        return StepCostTable.flat(max_rows=rows)
    points = np.unique(np.append(np.geomspace(1, rows, 24).astype(int), rows))
    samples = [
        (int(n), context, float(roofline.predict_ms(float(n), context)))
        for n in points
        for context in _CONTEXTS
    ]
    return StepCostTable(samples, max_rows=rows, captured_sizes=captured_sizes(runner))


def bare_roofline(runner: Any, group: Any) -> Roofline | None:
    """The target's roofline on rank 0's device; None where the target is no dense decoder.

    Every rank must call it: peaks that are measured differ from rank to rank.
    """
    model_config = runner.vllm_config.model_config
    try:
        shape = ModelShape.from_config(
            model_config.hf_text_config,
            bytes_per_element=model_config.dtype.itemsize,
            tp=runner.parallel_config.tensor_parallel_size,
        )
    except ValueError as error:
        logger.warning("No roofline for this target (%s): costs are the measured ones only", error)
        return None
    spec = of_rank_0(group, lambda: device_spec(runner.device, model_config.dtype))
    return Roofline(shape, spec)


def captured_sizes(runner: Any) -> list[int]:
    """Token counts of the FULL graphs of a verifying step, ascending; empty without graphs."""
    manager = runner.cudagraph_manager
    if manager is None or (not manager.needs_capture() and runner.device.type == "cpu"):
        return []
    return sorted(manager.captured_token_counts())


def profile_key(runner: Any) -> ProfileKey:
    """Everything that the measured times of this engine depend on."""
    config = runner.vllm_config
    spec: BastionSpeculativeConfig = config.speculative_config
    backend = {g.backend.get_name() for groups in runner.attn_groups for g in groups}
    return ProfileKey(
        device=device_name(runner.device),
        target_hash=config_hash(config.model_config.hf_text_config.to_dict()),
        drafter_hash=config_hash(spec.draft_model_config.hf_config.to_dict()),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        attention_backend="+".join(sorted(backend)),
        tp_size=config.parallel_config.tensor_parallel_size,
        vllm_version=vllm.__version__,
        graph_sizes=tuple(captured_sizes(runner)),
    )


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


def measure(runner: Any, key: ProfileKey, group: Any) -> Profile:
    """Time the grid rows x contexts and fit the roofline to it. Its steps are collective."""
    start = time.perf_counter()
    sizes = sizes_to_measure(captured_sizes(runner), runner.max_num_tokens)
    longest = max(1, runner.max_model_len - 1)
    contexts = sorted({min(c, longest) for c in _CONTEXTS})
    if runner.device.type == "cpu":
        runner.step_timing = HostStepTimingCollector()
    head_ms = {n: _head_ms(runner, n) for n in sizes}
    samples: list[tuple[int, float, float, int]] = []
    drafter: list[tuple[int, float]] = []
    for context in contexts:
        _steps(runner, sizes, context, repeats=1)  # first use of a shape is no measurement
        for step in _steps(runner, sizes, context, _REPEATS):
            rows, reqs = step.num_target_tokens, step.num_reqs
            head = np.interp(rows, list(head_ms), list(head_ms.values()))
            samples.append((rows, float(context), step.forward_ms + float(head), reqs))
            drafter.append((reqs, step.drafter_ms))
    table = StepCostTable(
        samples,
        drafter,
        max_rows=runner.max_num_tokens,
        captured_sizes=captured_sizes(runner),
    )
    roofline = bare_roofline(runner, group)
    report = calibrate_and_report(roofline, samples) if roofline else None
    profile = Profile.from_measurement(key, table, report)
    error = ""
    if report is not None:
        error = f"; roofline error {report.rmse_before:.2f} -> {report.rmse_after:.2f} ms"
    logger.info(
        "Measured the cost of a step at %d sizes x %d contexts in %.1f s%s",
        len(sizes),
        len(contexts),
        time.perf_counter() - start,
        error,
    )
    return profile


def _steps(runner: Any, sizes: list[int], context: int, repeats: int) -> list[Any]:
    with runner.step_timing.collect() as timings:
        for rows in sizes:
            for _ in range(repeats):
                dummy_tree_step(runner, rows, context)
    return list(timings)


def dummy_tree_step(runner: Any, rows: int, context: int = 0) -> None:
    """Run a dummy batch as a step with trees is run: on the kernel that reads the mask."""
    trees = runtime_of(runner.vllm_config).trees
    trees.always_masking = True
    try:
        runner._dummy_run(rows, context_len=context, skip_eplb=True)
    finally:
        trees.always_masking = False


def _head_ms(runner: Any, rows: int) -> float:
    """Median milliseconds of the target's output head over `rows` rows."""
    hidden = torch.zeros(
        rows,
        runner.model_config.get_hidden_size(),
        dtype=runner.model_config.dtype,
        device=runner.device,
    )
    times = []
    for _ in range(_REPEATS):
        start, end = new_mark(runner.device), new_mark(runner.device)
        start.record()
        runner.model.compute_logits(hidden)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)
