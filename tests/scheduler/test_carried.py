# SPDX-License-Identifier: Apache-2.0
"""What our schedulers, workers and vLLM's statistics tell each other, and how vLLM builds them."""

from __future__ import annotations

import threading
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingLogging
from vllm.v1.worker.gpu_worker import Worker

from tests.scheduler_core import GAMMA, NODES, call, new_core, new_request, settings
from vllm_bastion.attached import StepPlan, StepReport
from vllm_bastion.hooks.engine_args import use_own_classes
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.validate import BastionConfigError


def scheduled(**drafts: int) -> Any:
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts.items()},
        num_scheduled_tokens={name: 1 + count for name, count in drafts.items()},
        total_num_scheduled_tokens=sum(1 + count for count in drafts.values()),
        num_invalid_spec_tokens=None,
        finished_req_ids=set(),
        kv_cache_block_copies=None,
    )
    StepPlan().attach(output)
    return output


def test_nodes_that_were_not_verified_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    output, seen, result = scheduled(a=64, b=64, c=15), [], dict[int, Any]()
    output.num_invalid_spec_tokens = {"c": 5}

    def original(scheduler_output: Any, runner_output: Any) -> dict[int, Any]:
        seen.append(dict(scheduler_output.num_invalid_spec_tokens))
        return result

    runner_output = SimpleNamespace()
    StepReport({"a": 60, "c": 12}).attach(runner_output)
    monkeypatch.setenv("VLLM_BASTION_TELEMETRY", "0")
    core = new_core()
    assert call(core, "update_from_output", original, output, runner_output) is result
    assert seen == [{"a": 4, "b": 64, "c": 5}]


def test_counts_stay_where_nothing_was_drafted() -> None:
    output = scheduled()
    call(new_core(), "update_from_output", lambda *_: {}, output, SimpleNamespace())
    assert output.num_invalid_spec_tokens is None


def test_a_step_with_drafts_must_say_what_it_verified() -> None:
    with pytest.raises(RuntimeError, match="lost the StepReport"):
        call(
            new_core(), "update_from_output", lambda *_: None,
            scheduled(a=64), SimpleNamespace(),
        )  # fmt: skip


def test_records_survive_the_way_between_processes() -> None:
    """vLLM's executors send both through this queue."""
    queue = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue_ready = threading.Thread(target=queue.wait_until_ready)
    queue_ready.start()
    reader.wait_until_ready()
    queue_ready.join()
    step = SchedulerOutput.make_empty()
    plan = StepPlan(Arm.PLAIN, Arm.NGRAM, "fastest", 2.5)
    plan.attach(step)
    result = ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0})
    report = StepReport({"r": 3}, Arm.NGRAM, 1.5, [3, 0, 0, 1, 0, 0])
    report.attach(result)
    queue.enqueue((step, result))
    got_step, got_result = reader.dequeue(timeout=30)
    assert StepPlan.of(got_step) == plan and StepReport.of(got_result) == report
    assert got_step is not step and got_result is not result


@pytest.mark.parametrize("nodes", [NODES, 3])
@pytest.mark.parametrize(("lookup", "depth"), [(False, GAMMA), (True, 31)])
def test_bitmasks_are_sized_by_depth(nodes: int, lookup: bool, depth: int) -> None:
    chosen = settings()
    chosen.num_speculative_tokens, chosen.bastion_lookup = nodes, lookup
    core = new_core(config=chosen)
    depth = min(max(GAMMA, nodes), depth)
    view = core.structured_output_manager.vllm_config.speculative_config
    assert view.num_speculative_tokens == min(nodes, depth)
    assert core.vllm_config.speculative_config.num_speculative_tokens == nodes


def test_tokens_behind_a_stop_do_not_count_as_computed() -> None:
    """A connector sends the cache of as many tokens as were computed."""
    core = new_core()
    for hybrid, expected in ((False, 29), (True, 40)):
        request = new_request(num_computed_tokens=40, num_output_placeholders=3)
        core.has_mamba_layers, request.resumable = hybrid, False
        assert core._handle_stopped_request(request)
        assert request.num_computed_tokens == expected


def test_statistics_of_a_tree_count_nodes_and_depths() -> None:
    core, stats, depth = new_core(), None, settings().tree_depth
    # (verified, accepted): more nodes than depths, fewer, and none, which is no draft
    for verified, accepted in ((60, 5), (3, 1), (0, 0)):
        stats = core.make_spec_decoding_stats(
            stats, num_draft_tokens=NODES, num_accepted_tokens=accepted,
            num_invalid_spec_tokens={"r": NODES - verified}, request_id="r",
        )  # fmt: skip
    assert (stats.num_spec_tokens, stats.num_drafts) == (depth, 2)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (63, 6)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 1, 1, *[0] * (depth - 5)]
    assert len(stats.num_draft_tokens_per_pos) == depth
    line: list[str] = []
    log = SpecDecodingLogging()
    log.observe(stats)
    log.log(log_fn=lambda text, *values: line.append(text % values))
    assert "Mean acceptance length: 4.00" in line[0] and "Drafted: 63 tokens" in line[0]


def test_a_step_that_drafts_nothing_has_no_statistics() -> None:
    """vLLM's log divides by the drafts of the steps that have statistics."""
    core = new_core()
    assert core.make_spec_decoding_stats(None, NODES, 0, {"r": NODES}, "r") is None


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_builds_our_scheduler_and_worker(ahead: bool) -> None:
    def config(**changes: Any) -> Any:
        given = {"scheduler_cls": None, "worker_cls": "vllm.v1.worker.gpu_worker.Worker", **changes}
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                async_scheduling=ahead, scheduler_cls=given["scheduler_cls"]
            ),
            parallel_config=SimpleNamespace(worker_cls=given["worker_cls"]),
            attention_config=SimpleNamespace(backend=None),
        )

    ours = config()
    use_own_classes(ours)
    assert resolve_name(ours.parallel_config.worker_cls).__mro__[1] is Worker
    found = resolve_name(ours.scheduler_config.scheduler_cls)
    assert issubclass(found, AsyncScheduler) == ahead and issubclass(found, Scheduler)
    for name in ("scheduler_cls", "worker_cls"):
        with pytest.raises(BastionConfigError, match=name.replace("_", "-")):
            use_own_classes(config(**{name: "mine.Own"}))
