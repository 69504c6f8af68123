# SPDX-License-Identifier: Apache-2.0
"""Give an engine its step costs, after vLLM's warm-up and before the first request."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group

from vllm_bastion import envs
from vllm_bastion.calibration.measure import may_stop_early, measure, warm_up
from vllm_bastion.config import BastionSpeculativeConfig, host_choices, is_lagged, settings_of
from vllm_bastion.engine.runtime import runtime_of
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host
from vllm_bastion.policy.controller import Controller
from vllm_bastion.policy.cost.models import make_latency
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
    captured = current_host().captured_sizes(runner.cudagraph_manager)
    costs = "not needed for a fixed budget"
    if config.bastion_budget == "adaptive":
        start = time.perf_counter()
        _make_controller(runner, config, captured, group)
        costs = f"measured in {time.perf_counter() - start:.1f} s"
    if current_host().needs_twins():
        warm_up(runner, group)
    runtime = runtime_of(runner.vllm_config)
    runtime.graph_sizes = np.array(captured, dtype=np.int64)
    if may_stop_early(runner):
        runtime.reach = DraftReach(runner.max_num_reqs, runtime.trees.gamma)
    _start_recording(runner)
    if group.rank_in_group == 0:
        _log_choices(runner, config, costs)


def _make_controller(
    runner: Any, config: BastionSpeculativeConfig, captured: list[int], group: Any
) -> None:
    runtime = runtime_of(runner.vllm_config)
    table = measure(runner, captured, group)
    calibrated = table.carrier
    latency = make_latency(
        config.bastion_latency_model,
        table,
        roofline=getattr(calibrated, "roofline", None),
        calibrated=calibrated,
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


def _start_recording(runner: Any) -> None:
    """Record steps from now on, after warm-up and calibration."""
    if not envs.telemetry():
        return
    runtime = runtime_of(runner.vllm_config)
    trees, controller = runtime.trees, runtime.controller
    kind = "chain" if trees.chains else "tree"
    latest = dict if controller is None else controller.correction
    recorder = Recorder(kind, "no gate" if trees.budget is None else "fixed budget", latest)
    if controller is not None:
        controller.on_step = recorder.timed
    runtime.recorder = recorder


def _log_choices(runner: Any, config: BastionSpeculativeConfig, costs: str) -> None:
    drafter = "+".join(config.draft_model_config.hf_config.architectures)
    top_k = runtime_of(runner.vllm_config).trees.top_k
    timing = ""
    if config.bastion_budget == "adaptive":
        timing = f" ({'lagged' if is_lagged(config) else 'exact'})"
    parts = [
        f"{drafter} with gamma {config.bastion_gamma}, K {top_k}, "
        f"N {config.num_speculative_tokens}",
        f"budget {config.bastion_budget}{timing}",
        f"step costs {costs}",
        *host_choices(runner.vllm_config).texts(),
    ]
    logger.info("Bastion: %s", "; ".join(parts))
    warning = current_host().warning()
    if warning is not None:
        logger.warning("%s", warning)
