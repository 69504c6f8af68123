# SPDX-License-Identifier: Apache-2.0
"""The step costs of one engine: measured, loaded from a stored profile, or a roofline's.

Runs once, after vLLM's warm-up and before the first request.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group

from vllm_bastion import envs
from vllm_bastion.calibration import summary
from vllm_bastion.calibration.agreement import from_rank_0, shared_profile
from vllm_bastion.calibration.key import host_choices, key_of
from vllm_bastion.calibration.measure import limits_of, may_stop_early, measure, warm_up
from vllm_bastion.calibration.points import CONTEXTS
from vllm_bastion.config import BastionSpeculativeConfig, is_lagged, settings_of
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.controller import Controller
from vllm_bastion.policy.cost.devices import device_name, device_spec
from vllm_bastion.policy.cost.models import make_latency
from vllm_bastion.policy.cost.paper import ModelShape, Roofline
from vllm_bastion.policy.cost.store import Profile, ProfileKey, unix_time
from vllm_bastion.policy.cost.table import StepCostTable
from vllm_bastion.policy.cost.timing import StepTimer
from vllm_bastion.policy.reach import DraftReach
from vllm_bastion.telemetry.recorder import Recorder

logger = init_logger(__name__)


@torch.inference_mode()
def calibrate(runner: Any) -> None:
    """Give the engine of `runner` (a ``GPUModelRunner``) its step costs, and log its choices."""
    config = settings_of(runner.vllm_config)
    # Tensor-parallel ranks, and data-parallel ranks that step together (a mixture of experts'):
    # data-parallel ranks of a dense model are separate engines to vLLM.
    group = get_world_group()
    if config.bastion_budget == "adaptive":
        costs = _set_costs(runner, config, group)
    else:
        costs = summary.FIXED_BUDGET
    if current_host().needs_twins():
        warm_up(runner, group)
    runtime = runtime_of(runner.vllm_config)
    runtime.graph_sizes = np.array(captured_sizes(runner), dtype=np.int64)
    if may_stop_early(runner):
        runtime.reach = DraftReach(runner.max_num_reqs, runtime.trees.gamma)
    _start_recording(runner)
    if group.rank_in_group == 0:
        logger.info("%s", _summary(runner, config, costs).sentence())
        warning = current_host().warning()
        if warning is not None:
            logger.warning("%s", warning)


def _set_costs(runner: Any, config: BastionSpeculativeConfig, group: Any) -> str:
    """Make the controller. Returns where its costs come from, for `EngineSummary`."""
    runtime = runtime_of(runner.vllm_config)
    key = profile_key(runner)
    measured_s = 0.0

    def measured() -> Profile:
        nonlocal measured_s
        logger.info(
            "Measuring what steps cost on this machine, once: expect 5 to 60 s, more for large "
            "models on a CPU; later starts read the profile"
        )
        start = time.perf_counter()
        roofline = bare_roofline(runner, group)
        profile = measure(runner, key, roofline, captured_sizes(runner), group)
        measured_s = time.perf_counter() - start
        return profile

    profile = shared_profile(config.bastion_calibration, key, measured, group)
    if profile is not None and group.rank_in_group == 0:
        _log_doubts(profile)
    if profile is None:
        roofline = bare_roofline(runner, group)
        table, calibrated = _prior(runner, roofline), None
        costs = summary.FLAT if roofline is None else summary.ROOFLINE
    else:
        # The table's length depends on the most rows of a step; the profile does not.
        table = profile.table.with_max_rows(runner.max_num_tokens)
        calibrated = profile.calibrated
        roofline = calibrated.roofline if calibrated else None
        costs = summary.measured(measured_s) if measured_s else summary.loaded(profile.created)
        runtime.profile_time = unix_time(profile.created)
    latency = make_latency(
        config.bastion_latency_model, table, roofline=roofline, calibrated=calibrated
    )
    runtime.controller = Controller(
        runtime.trees.gamma,
        runner.max_num_reqs,
        latency,
        runtime.trees,
        copy_depth=runtime.trees.depth if config.bastion_lookup else 0,
        sees_copies=not current_host().runs_ahead,
    )
    # `table` and `static` are used as they are, T_aux included.
    if config.bastion_latency_model.startswith("ema"):
        # Data-parallel ranks decide independently: drafters share no collective across them, and
        # each rank's step takes as long as the slowest rank's.
        ranks = get_tp_group()
        runtime.learns_with_others = ranks.world_size > 1
        if ranks.rank_in_group == 0:
            runtime.timer = StepTimer(runner.device)
    return costs


def _log_doubts(profile: Profile) -> None:
    found = profile.doubts()
    if found:
        more = f" ({len(found) - 1} more, see vllm-bastion show --table)" if len(found) > 1 else ""
        logger.warning(
            "Step costs are doubtful: %s%s. Start again on an idle machine, or measure once with "
            "'vllm-bastion calibrate'",
            found[0],
            more,
        )


def _start_recording(runner: Any) -> None:
    """Record steps from now on, after warm-up and calibration."""
    if not envs.telemetry():
        return
    runtime = runtime_of(runner.vllm_config)
    trees, controller = runtime.trees, runtime.controller
    kind = "chain" if trees.chains else "tree"
    profile_time = {} if runtime.profile_time is None else {"profile_time": runtime.profile_time}

    def latest() -> dict[str, float]:
        return {**profile_time, **({} if controller is None else controller.correction())}

    recorder = Recorder(kind, "no gate" if trees.budget is None else "fixed budget", latest)
    if controller is not None:
        controller.on_step = recorder.timed
    runtime.recorder = recorder


def _summary(runner: Any, config: BastionSpeculativeConfig, costs: str) -> summary.EngineSummary:
    return summary.EngineSummary(
        drafter="+".join(config.draft_model_config.hf_config.architectures),
        gamma=config.bastion_gamma,
        candidates=runtime_of(runner.vllm_config).trees.top_k,
        nodes=config.num_speculative_tokens,
        budget=config.bastion_budget,
        lagged=is_lagged(config),
        costs=costs,
        choices=host_choices(runner.vllm_config),
    )


def _prior(runner: Any, roofline: Roofline | None) -> StepCostTable:
    """The bare roofline as a table, for an engine that is not measured."""
    rows = runner.max_num_tokens
    if roofline is None:
        return StepCostTable.flat(max_rows=rows)
    points = np.unique(np.append(np.geomspace(1, rows, 24).astype(int), rows))
    samples = [
        (int(n), context, float(roofline.predict_ms(float(n), context)))
        for n in points
        for context in CONTEXTS
    ]
    return StepCostTable(samples, max_rows=rows, captured_sizes=captured_sizes(runner))


def bare_roofline(runner: Any, group: Any) -> Roofline | None:
    """The target's roofline on rank 0's device; None if the target is not a dense decoder.

    Collective: every rank must call it. Measured peaks differ between ranks, so rank 0's are used.
    """
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
    spec = from_rank_0(group, lambda: device_spec(runner.device, model_config.dtype))
    return Roofline(shape, spec)


def captured_sizes(runner: Any) -> list[int]:
    """Token counts of the FULL CUDA graphs of a verifying step, ascending; empty without graphs."""
    return current_host().captured_sizes(runner.cudagraph_manager)


def profile_key(runner: Any) -> ProfileKey:
    """Everything that the measured times of this engine depend on."""
    captured = captured_sizes(runner)
    return key_of(
        runner.vllm_config,
        device=device_name(runner.device),
        backends={g.backend.get_name() for groups in runner.attn_groups for g in groups},
        captured=captured,
        largest=limits_of(runner).largest_steps(captured),
    )
