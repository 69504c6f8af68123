# SPDX-License-Identifier: Apache-2.0
"""The patch table against the installed vLLM, and what the hooks and schedulers do.

The first part is the contract: it names what changed when another vLLM is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import threading
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm
from vllm.v1.worker.gpu_worker import Worker

from tests.scheduler_core import call, make_core
from vllm_bastion import compat, hooks, plugin
from vllm_bastion.carriers import (
    MissingCarrierError,
    RequestState,
    StepPlan,
    StepReport,
)
from vllm_bastion.checks import BastionConfigError
from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.hooks import HookError, scheduler, wrap
from vllm_bastion.hooks.engine_args import use_own_classes
from vllm_bastion.hooks.runner import execute_model
from vllm_bastion.hooks.telemetry import stat_logger_manager_init
from vllm_bastion.versions import capabilities_of

GAMMA, NODES = 7, 64


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()


# --- the contract -----------------------------------------------------------------------------

VERSIONS = [capabilities_of(version) for version in ("0.32", "0.33")]


def accepted(hook: hooks.Hook) -> tuple[str, ...]:
    """The signatures the hook was written for, one per version of vLLM."""
    return tuple(version.signatures.get(hook.target, hook.expects) for version in VERSIONS)


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.rpartition(":")[2])
def test_vllm_still_has_the_hooked_symbol_as_expected(hook: hooks.Hook) -> None:
    if current_platform.is_cpu():  # what the CPU worker does before it loads the runner
        importlib.import_module("vllm.v1.worker.cpu.shm")
    _, _, attribute = hooks.resolve(hook.target)
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    original = inspect.unwrap(function)
    assert hooks.signature(original) == hook.signature(), f"vLLM's {hook.target} changed"
    assert all((hook.why, hook.what, hook.upstream, hook.when))


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.rpartition(":")[2])
def test_wrapper_takes_the_original_and_its_arguments(hook: hooks.Hook) -> None:
    parameters = list(inspect.signature(hook.function()).parameters.values())
    assert parameters[0].name == "original"
    for signature in accepted(hook):
        expected = signature.strip("()").replace("=", "").split(", ")
        for given, name in zip(parameters[1:], expected, strict=False):
            variadic = given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD)
            assert variadic or given.name == name


# --- the wrap helper --------------------------------------------------------------------------


class Sample:
    """Stands for a class of vLLM; the tests wrap a fresh subclass each."""

    def method(self, a: int, b: int = 2) -> int:
        return a + b

    @staticmethod
    def static(a: int) -> int:
        return a

    @classmethod
    def made(cls, a: int) -> tuple[str, int]:
        return cls.__name__, a

    @property
    def value(self) -> int:
        return 3


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> type[Sample]:
    fresh = type("Sample", (), {k: v for k, v in vars(Sample).items() if k != "__dict__"})
    monkeypatch.setattr(__import__(__name__), "Sample", fresh)
    return fresh


def _add_hundred(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    return (result[0], result[1] + 100) if isinstance(result, tuple) else result + 100


@pytest.mark.parametrize("name", ["method", "static", "made", "value"])
def test_wrapping_keeps_the_kind_of_attribute(name: str, sample: type[Sample]) -> None:
    target = f"{__name__}:Sample.{name}"
    assert not hooks.is_wrapped(target)
    wrap(target, _add_hundred)
    assert hooks.is_wrapped(target)
    kind = type(inspect.getattr_static(Sample, name))
    assert type(inspect.getattr_static(sample, name)) is kind
    instance = sample()
    calls = {
        "method": lambda: (instance.method(1), instance.method(1, b=5)) == (103, 106),
        "static": lambda: sample.static(1) == instance.static(1) == 101,
        "made": lambda: sample.made(1) == ("Sample", 101),
        "value": lambda: instance.value == 103,
    }
    assert calls[name]()


def test_wrapping_twice_wraps_once(sample: type[Sample]) -> None:
    target = f"{__name__}:Sample.method"
    wrap(target, _add_hundred, expects="(self, a, b=)")
    first = vars(sample)["method"]
    wrap(target, _add_hundred, expects="(self, a, b=)")
    assert vars(sample)["method"] is first
    assert hooks.signature(first.__wrapped__) == "(self, a, b=)"
    assert sample().method(1) == 103
    with pytest.raises(HookError, match="already has the hook _add_hundred"):
        wrap(target, lambda original, *args: original(*args))


def test_a_changed_signature_is_told_in_both_forms(sample: type[Sample]) -> None:
    with pytest.raises(HookError) as caught:
        wrap(f"{__name__}:Sample.method", _add_hundred, expects="(self, a)")
    assert "now takes (self, a, b=), expected (self, a)" in str(caught.value)
    assert sample().method(1) == 3
    wrap(f"{__name__}:Sample.method", _add_hundred, expects="(self, a, b=)")
    assert sample().method(1) == 103


@pytest.mark.parametrize("target", ["vllm.nowhere:f", "vllm.config:Nothing.f", "vllm.config:f"])
def test_a_missing_symbol_is_named(target: str) -> None:
    with pytest.raises(HookError, match="no longer has") as caught:
        wrap(target, _add_hundred)
    assert target in str(caught.value)


def test_a_hook_that_does_not_fit_disables_only_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_reasons", [])
    (hook,) = [one for one in hooks.HOOKS if one.target.endswith("process_inputs")]
    changed = dataclasses.replace(hook, expects="(self)", wrapper="requests:check_budget")
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, changed))
    hooks.apply_all()
    with pytest.raises(compat.UnsupportedVllmError, match="process_inputs"):
        hooks.require_all()


# --- what the hooks do ------------------------------------------------------------------------


def _settings(budget: int | str = "adaptive") -> BastionSpeculativeConfig:
    """Settings without the models that vLLM's constructor wants."""
    settings = object.__new__(BastionSpeculativeConfig)
    settings.bastion_budget = budget
    settings.num_speculative_tokens = NODES
    settings.bastion_gamma = GAMMA
    return settings


def _engine_with(settings: Any) -> Any:
    return SimpleNamespace(speculative_config=settings)


def Core(settings: Any, **requests: Any) -> Any:
    """Our scheduler as far as its own methods look."""
    blocks: dict[str, list[int]] = {}
    group = SimpleNamespace(block_size=16, req_to_blocks=blocks)
    core: Any = make_core(
        vllm_config=_engine_with(settings),
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
        blocks=blocks,
        free=1 << 20,
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=[group]),
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: core.free),
        ),
    )
    return core


def test_lookahead_follows_the_drafter_only_for_bastion() -> None:
    from vllm_bastion.hooks.engine_args import num_lookahead_tokens

    assert num_lookahead_tokens(lambda _: 99, _engine_with(_settings())) == GAMMA + 1
    assert num_lookahead_tokens(lambda _: 99, _engine_with(None)) == 99


def test_statistics_of_a_tree_count_nodes_and_depths() -> None:
    core, stats, depth = Core(_settings()), None, _settings().tree_depth
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
    core = Core(_settings())
    assert core.make_spec_decoding_stats(None, NODES, 0, {"r": NODES}, "r") is None


def test_statistics_travel_to_the_front_end() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    stats = scheduler.TreeSpecDecodingStats.new(GAMMA)
    stats.observe_draft(60, 5)
    sent = MsgpackEncoder().encode(SchedulerStats(spec_decoding_stats=stats))
    got = MsgpackDecoder(SchedulerStats).decode(sent).spec_decoding_stats
    assert (got.num_draft_tokens, got.num_accepted_tokens) == (60, 5)


def test_prometheus_has_one_counter_per_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(**kwargs: Any) -> prometheus_client.Counter:
        return prometheus_client.Counter(registry=registry, **kwargs)

    monkeypatch.setattr(SpecDecodingProm, "_counter_cls", staticmethod(counter))
    depth, made = _settings().tree_depth, []

    def original(manager: Any, vllm_config: Any) -> None:
        labels = ["model_name", "engine"]
        made.append(SpecDecodingProm(vllm_config.speculative_config, labels, {0: ["tiny", "0"]}))

    monkeypatch.setenv("VLLM_BASTION_TELEMETRY", "0")
    stat_logger_manager_init(original, SimpleNamespace(), _engine_with(_settings()))
    (metrics,) = made
    stats = scheduler.TreeSpecDecodingStats.new(depth)
    stats.observe_draft(60, 5)
    metrics.observe(stats)
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert samples["vllm:spec_decode_num_draft_tokens_total", None] == 60
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    got = [samples[per_position, str(position)] for position in range(depth)]
    assert got == [1, 1, 1, 1, 1, *[0] * (depth - 5)]
    assert (per_position, str(depth)) not in samples


def _scheduled(**drafts: int) -> Any:
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts.items()},
        num_scheduled_tokens={name: 1 + count for name, count in drafts.items()},
        total_num_scheduled_tokens=sum(1 + count for count in drafts.values()),
        num_invalid_spec_tokens=None,
        finished_req_ids=set(),
        kv_cache_block_copies=None,
    )


def _reported(num_verified: dict[str, int], drafting: bool = True) -> Any:
    output = SimpleNamespace()
    StepReport(num_verified, drafting).attach(output)
    return output


def test_nodes_that_were_not_verified_are_not_counted() -> None:
    output, seen = _scheduled(a=64, b=64, c=15), []
    output.num_invalid_spec_tokens = {"c": 5}

    def original(scheduler_output: Any, runner_output: Any) -> str:
        seen.append(dict(scheduler_output.num_invalid_spec_tokens))
        return "result"

    runner_output = _reported({"a": 60, "c": 12})
    core = Core(_settings())
    assert call(core, "update_from_output", original, output, runner_output) == "result"
    assert seen == [{"a": 4, "b": 64, "c": 5}]


def test_counts_stay_where_nothing_was_drafted() -> None:
    output = _scheduled()
    call(Core(_settings()), "update_from_output", lambda *_: None, output, SimpleNamespace())
    assert output.num_invalid_spec_tokens is None


def test_a_step_with_drafts_must_say_what_it_verified() -> None:
    with pytest.raises(MissingCarrierError, match="lost the StepReport"):
        call(
            Core(_settings()), "update_from_output", lambda *_: None,
            _scheduled(a=64), SimpleNamespace(),
        )  # fmt: skip


@pytest.mark.parametrize("plan", [False, True])
def test_a_step_with_a_grammar_must_say_which_nodes_it_verifies(plan: bool) -> None:
    runner = SimpleNamespace(vllm_config=_engine_with(_settings()), adaptive_verification=object())
    runner.vllm_config.speculative_config.worker_runtime = Runtime(SimpleNamespace())
    output, ran = _scheduled(a=5), []
    output.has_structured_output_requests = True
    if plan:
        StepPlan().attach(output)
        execute_model(lambda *_: ran.append(output), runner, output)
        assert ran == [output]
    else:
        with pytest.raises(MissingCarrierError, match="lost the StepPlan"):
            execute_model(lambda *_: ran.append(output), runner, output)


def test_records_survive_the_way_between_processes() -> None:
    """vLLM's executors send both through this queue."""
    queue = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue_ready = threading.Thread(target=queue.wait_until_ready)
    queue_ready.start()
    reader.wait_until_ready()
    queue_ready.join()
    step = SchedulerOutput.make_empty()
    plan = StepPlan({"r": ([0, 2], [0, 1])})
    plan.attach(step)
    result = ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0})
    report = StepReport({"r": 3}, drafting=False)
    report.attach(result)
    queue.enqueue((step, result))
    got_step, got_result = reader.dequeue(timeout=30)
    assert StepPlan.of(got_step) == plan and StepReport.of(got_result) == report
    assert got_step is not step and got_result is not result


def _request(grammar: bool = False, drafts: int = 0, **more: int) -> Any:
    given = {"num_tokens": 30, "num_computed_tokens": 29, "num_output_placeholders": 0, **more}
    given = {"sampling_params": None, "status": RequestStatus.WAITING, **given}
    return SimpleNamespace(use_structured_output=grammar, spec_token_ids=[-1] * drafts, **given)


def _step(core: Any, admitted: int = 0, tokens: int = 0) -> dict[str, int]:
    """Run the hook; returns the placeholders that vLLM's `schedule` finds."""
    found: dict[str, int] = {}

    def original(throttle_prefills: bool) -> Any:
        assert throttle_prefills
        found.update({k: len(r.spec_token_ids) for k, r in core.requests.items()})
        return SimpleNamespace(
            scheduled_new_reqs=[None] * admitted,
            total_num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens={},
        )

    call(core, "schedule", original, True)
    return found


def test_a_lone_request_gets_all_its_nodes_in_a_small_step() -> None:
    core = Core(_settings(), a=_request(drafts=NODES))
    core.max_num_scheduled_tokens = 128
    assert _step(core) == {"a": NODES}
    # whatever its last tree was worth
    RequestState(wanted_placeholders=GAMMA).attach(core.requests["a"])
    assert _step(core) == {"a": NODES}


@pytest.mark.parametrize(
    ("reqs", "budget", "expected"),
    [
        (1, "adaptive", NODES), (31, "adaptive", NODES), (64, "adaptive", 31), (500, "adaptive", 3),
        (2048, "adaptive", 0), (1, 8, 8), (20, 8, 8), (1, 0, 1),
    ],
)  # fmt: skip
def test_placeholders_share_what_the_roots_leave(reqs: int, budget: Any, expected: int) -> None:
    shared = [-1] * NODES  # one list of all requests, with async scheduling
    core = Core(_settings(budget), **{str(i): _request() for i in range(reqs)})
    for request in core.running:
        request.spec_token_ids = shared
    found = _step(core)
    assert set(found.values()) <= {expected, expected + 1}
    assert len(shared) == NODES


def test_nothing_is_scheduled_for_trees_that_are_not_drafted() -> None:
    core = Core(_settings(), a=_request(drafts=NODES), b=_request(drafts=NODES))
    output = _scheduled(a=NODES, b=NODES)
    for drafting in (False, True):
        said = _reported({"a": 3}, drafting)
        call(core, "update_from_output", lambda *_: None, output, said)
        for request in core.running:
            request.spec_token_ids = [-1] * NODES
        assert set(_step(core).values()) == {NODES if drafting else 0}


def test_what_was_verified_says_how_many_are_wanted() -> None:
    core = Core(_settings(), a=_request(), b=_request())
    said = _reported({"a": 40, "b": 2, "gone": 5})
    output = _scheduled(a=NODES, b=NODES, gone=NODES)
    call(core, "update_from_output", lambda *_: None, output, said)
    assert RequestState.of(core.requests["a"]).wanted_placeholders == 80
    assert RequestState.of(core.requests["b"]).wanted_placeholders == 2 + GAMMA


def test_a_request_with_a_grammar_gets_63_placeholders_at_most() -> None:
    core = Core(_settings(), g=_request(True, NODES), p=_request(drafts=NODES))
    assert _step(core) == {"g": 63, "p": NODES}
    # None is padded with N when it is admitted.
    assert set(core.dynamic_sd_lookup) == {NODES}


@pytest.mark.parametrize("nodes", [NODES, 3])
@pytest.mark.parametrize(("lookup", "depth"), [(False, GAMMA), (True, 31)])
def test_bitmasks_are_sized_by_depth(nodes: int, lookup: bool, depth: int) -> None:
    settings = _settings()
    settings.num_speculative_tokens, settings.bastion_lookup = nodes, lookup
    core, depth = Core(settings), min(max(GAMMA, nodes), depth)
    view = core.structured_output_manager.vllm_config.speculative_config
    assert view.num_speculative_tokens == min(nodes, depth)
    assert core.vllm_config.speculative_config.num_speculative_tokens == nodes


def test_tokens_behind_a_stop_do_not_count_as_computed() -> None:
    """A connector sends the cache of as many tokens as were computed."""
    core = Core(_settings())
    for hybrid, expected in ((False, 29), (True, 40)):
        request = _request(num_computed_tokens=40, num_output_placeholders=3)
        core.has_mamba_layers, request.resumable = hybrid, False
        assert core._handle_stopped_request(request)
        assert request.num_computed_tokens == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_builds_our_scheduler_and_worker(ahead: bool) -> None:
    def config(**changes: Any) -> Any:
        given = {"scheduler_cls": None, "worker_cls": "vllm.v1.worker.gpu_worker.Worker", **changes}
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                async_scheduling=ahead, scheduler_cls=given["scheduler_cls"]
            ),
            parallel_config=SimpleNamespace(worker_cls=given["worker_cls"]),
        )

    ours = config()
    use_own_classes(ours)
    assert resolve_name(ours.parallel_config.worker_cls).__mro__[1] is Worker
    found = resolve_name(ours.scheduler_config.scheduler_cls)
    assert issubclass(found, AsyncScheduler) == ahead and issubclass(found, Scheduler)
    for name in ("scheduler_cls", "worker_cls"):
        with pytest.raises(BastionConfigError, match=name.replace("_", "-")):
            use_own_classes(config(**{name: "mine.Own"}))
