# SPDX-License-Identifier: Apache-2.0
"""Which engines of a CPU host get Model Runner V2 and native kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
import vllm.triton_utils

from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.hooks import engine_args
from vllm_bastion.versions import capabilities_of


def engine(bastion: bool, unsupported: tuple[str, ...] = (), option: str = "") -> Any:
    """A VllmConfig as far as the hooks look."""
    settings = object.__new__(BastionSpeculativeConfig) if bastion else None
    return SimpleNamespace(
        speculative_config=settings,
        model_config=SimpleNamespace(**{option: True}),
        _get_v2_model_runner_unsupported_features=lambda: list(unsupported),
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with or without Triton, with or without a GPU, and what the user asked for."""

    def choose(triton: bool = False, cpu: bool = True, asked: str | None = None) -> None:
        monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", triton)
        stand_in = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setattr(vllm.platforms, "_current_platform", stand_in, raising=False)
        if asked is None:
            monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        else:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)

    return choose


@pytest.mark.parametrize(
    ("where", "bastion", "ours"),
    [
        ({}, True, True), ({}, False, False), ({"asked": "1"}, False, True),
        ({"asked": "0"}, True, False), ({"triton": True}, True, False),
        ({"cpu": False}, True, False),
    ],
)  # fmt: skip
def test_only_who_needs_it_gets_v2_on_native_kernels(
    host: Any, where: dict[str, Any], bastion: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(**where)
    worker: Any = SimpleNamespace(HAS_TRITON=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", worker)
    config = engine(bastion)
    assert engine_args.runs_on_replacement(config) is ours
    for answer in (True, False):
        assert engine_args.use_v2_model_runner(lambda _, a=answer: a, config) is (ours or answer)
    assert not worker.HAS_TRITON, "reading a property of a config changes nothing"
    called: list[Any] = []
    engine_args.validate_v2_model_runner(called.append, config)
    assert called == ([] if ours else [config])


def test_only_a_native_workers_constructor_believes_in_triton(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33's refuses V2 without it. What it was is restored, even after an error."""
    from vllm_bastion.hooks import cpu_worker

    host()
    module: Any = cpu_worker.gpu_worker
    seen: list[bool] = []

    def init(self: Any, vllm_config: Any) -> None:
        seen.append(module.HAS_TRITON)
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "HAS_TRITON", False, raising=False)
    monkeypatch.setattr(cpu_worker.CPUWorker, "__init__", init)
    monkeypatch.setattr(cpu_worker, "capabilities", lambda: capabilities_of("0.33"))
    for bastion in (True, False):
        with pytest.raises(RuntimeError, match="no memory"):
            cpu_worker.ReplacementWorker(vllm_config=engine(bastion))
    assert seen == [True, False]
    assert not module.HAS_TRITON


def test_what_v2_cannot_do_is_still_refused(host: Any) -> None:
    host()
    with pytest.raises(ValueError, match="does not yet support: elastic things"):
        engine_args.validate_v2_model_runner(print, engine(True, ("elastic things",)))
    host(asked="1")
    for option in ("enable_trace_replay", "enable_prompt_embeds", "use_fp64_gumbel"):
        with pytest.raises(ValueError, match=f"does not yet support: {option} on a CPU"):
            engine_args.validate_v2_model_runner(print, engine(False, option=option))
