# SPDX-License-Identifier: Apache-2.0
"""Step costs that a test gives an engine in place of measured ones.

They replace the profile of the start and the gate's clock, on which as much time passes between two
outputs as the later step costs. So decisions do not depend on the machine.
"""

from __future__ import annotations

from typing import Any

Costs = dict[str, float]


def linear(base: float, row: float, draft: float = 0.0) -> Costs:
    """Milliseconds: a step takes `base`, `row` for each of its rows, and `draft` if it drafts."""
    return {"base": base, "row": row, "draft": draft}


# Of an engine whose test does not depend on costs: measuring takes longer than all else in it.
USUAL = linear(10.0, 0.2)


def install(spec: dict[str, Any]) -> None:
    """Give this process's engine, and processes forked from here, the costs of its spec, if any."""
    costs = spec.get("costs")
    if costs is None:
        return
    from vllm_bastion.engine import profile
    from vllm_bastion.hooks import scheduler
    from vllm_bastion.scheduler.gate import Arm

    def curves(runner: Any) -> tuple[Any, Any]:
        runner.adaptive_verification._cudagraph_limit = 1  # costs between sizes are interpolated
        rows = [(n, costs["base"] + costs["row"] * n) for n in (1, 2, runner.max_num_tokens)]
        return [(1, costs["draft"])], rows

    update, seconds = scheduler.TreeScheduler.update_from_output, [0.0]

    def update_at_these_costs(self: Any, scheduled: Any, output: Any) -> Any:
        drafts, report = scheduled.scheduled_spec_decode_tokens, scheduler.StepReport.find(output)
        rows = scheduled.total_num_scheduled_tokens - sum(map(len, drafts.values()))
        rows += sum(report.num_verified.values()) if report is not None else 0
        ms = costs["base"] + costs["row"] * rows
        if scheduler.StepPlan.of(scheduled).arm == Arm.TREE:
            ms += costs["draft"]
        seconds[0] += ms / 1e3
        return update(self, scheduled, output)

    profile._time = curves  # type: ignore[assignment]
    scheduler.perf_counter = lambda: seconds[0]
    scheduler.TreeScheduler.update_from_output = update_at_these_costs  # type: ignore[method-assign]
