# SPDX-License-Identifier: Apache-2.0
"""Our schedulers without a KV cache, around a replacement for what vLLM's own do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.hooks.scheduler import BastionScheduler, TreeScheduler

GAMMA, NODES = 7, 64
BLOCK = 16  # tokens


def make_core(kind: type[TreeScheduler] = BastionScheduler, **attributes: Any) -> Any:
    """A scheduler with these attributes in place of those that vLLM's constructor makes."""

    def init(self: Any) -> None:
        self.__dict__.update(attributes)

    with patch.object(Scheduler, "__init__", init):
        return kind()


def call(core: Any, name: str, original: Callable[..., Any], *args: Any) -> Any:
    """Call a method of ours, whose `super()` is `original`, a function of the arguments alone."""
    with patch.object(Scheduler, name, lambda _, *given: original(*given)):
        return getattr(core, name)(*args)


def settings(budget: int | str = "adaptive") -> Any:
    """Settings without the models that vLLM's constructor wants."""
    made: Any = object.__new__(BastionSpeculativeConfig)
    made.bastion_budget = budget
    made.num_speculative_tokens, made.bastion_gamma = NODES, GAMMA
    return made


def engine_of(speculative_config: Any, graph: int | None = None, **more: Any) -> Any:
    """A VllmConfig as far as our code looks; graph: rows of the largest FULL graph, None: eager."""
    mode = CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE
    return SimpleNamespace(
        speculative_config=speculative_config,
        parallel_config=SimpleNamespace(data_parallel_size=more.get("data_parallel", 1)),
        model_config=SimpleNamespace(is_moe=more.get("is_moe", False)),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=graph),
    )


def new_request(drafts: int = 0, grammar: bool = False, **more: Any) -> Any:
    """A request that decodes: all tokens but the last are computed."""
    given: dict[str, Any] = {
        "num_tokens": 30, "num_computed_tokens": 29, "num_output_tokens": 5, "max_tokens": 100,
        "num_output_placeholders": 0, "sampling_params": None, "status": RequestStatus.WAITING,
        "use_structured_output": grammar, "structured_output_request": grammar or None,
        "spec_token_ids": [-1] * drafts, "blocks": 2,
    }  # fmt: skip
    given |= more
    prompt = given["num_computed_tokens"] < given["num_tokens"] - 1
    return SimpleNamespace(**given, is_prefill_chunk=prompt)


def new_core(
    kind: type[TreeScheduler] = BastionScheduler,
    config: Any = None,
    graph: int | None = None,
    free: int = 1 << 20,
    **requests: Any,
) -> Any:
    """Our scheduler as far as its own methods look.

    free: blocks left in the KV cache, which has two groups.
    """
    for name, request in requests.items():
        request.request_id = name
    blocks = {name: [0] * request.blocks for name, request in requests.items()}
    groups = [SimpleNamespace(block_size=BLOCK, req_to_blocks=blocks)] * 2
    return make_core(
        kind,
        vllm_config=engine_of(config or settings(), graph),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        structured_output_manager=SimpleNamespace(),
        log_stats=True,
        num_spec_tokens=NODES,
        requests=requests,
        running=list(requests.values()),
        waiting=[],
        kv_holding_waiting=[],
        _pause_state=PauseState.UNPAUSED,
        max_num_scheduled_tokens=2048,
        max_num_running_reqs=4096,
        max_num_active_reqs=4096,
        scheduler_config=SimpleNamespace(
            long_prefill_token_threshold=0, prefill_schedule_interval=1
        ),
        dynamic_sd_lookup=None,
        num_lookahead_tokens=GAMMA + 1,
        max_model_len=4096,
        has_mamba_layers=False,
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=groups),
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        ),
    )
