# SPDX-License-Identifier: Apache-2.0
"""What the steps of an engine's calibration give to the target: for `test_experts`."""

from __future__ import annotations

from typing import Any

_FORWARDS: list[dict[str, Any]] = []


def watch() -> None:
    """Record every forward pass of the target while step costs are measured."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from vllm_bastion.calibration import engine

    measure, route = engine.measure, CPURouter._compute_routing

    def routed(*args: Any, **kwargs: Any) -> Any:
        weights, experts = route(*args, **kwargs)
        _FORWARDS[-1]["experts"].append(len(experts.unique()))
        return weights, experts

    def measured(runner: Any, *args: Any) -> Any:
        hook = runner.model.register_forward_pre_hook(_forward, with_kwargs=True)
        CPURouter._compute_routing = routed
        try:
            return measure(runner, *args)
        finally:
            CPURouter._compute_routing = route
            hook.remove()

    engine.measure = measured


def _forward(_: Any, args: Any, given: dict[str, Any]) -> None:
    from vllm.forward_context import get_forward_context

    rows = given["inputs_embeds"] if given["input_ids"] is None else given["input_ids"]
    padding = get_forward_context().is_padding
    assert padding is not None
    _FORWARDS.append(
        {
            "rows": len(rows),
            "different": len(rows.unique(dim=0)),
            "padding": int(padding.sum()),
            "experts": [],
        }
    )


def seen(session: Any) -> list[dict[str, Any]]:
    """The forward passes of the engine's calibration, with the experts of each layer."""
    return _FORWARDS if session.forwards == 1 else []
