# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step schedules for the next one, and when none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler_core import (
    BLOCK,
    GAMMA,
    NODES,
    call,
    engine_of,
    new_core,
    new_request,
    settings,
)
from vllm_bastion.attached import StepPlan
from vllm_bastion.hooks.scheduler import BastionAsyncScheduler, BastionScheduler, _arms
from vllm_bastion.scheduler.gate import Arm

KINDS = [BastionScheduler, BastionAsyncScheduler]


def schedule(core: Any, tokens: int | None = None, admitted: int = 0) -> StepPlan:
    """Schedule a step of so many tokens, the most by default. Returns its plan."""
    output = SimpleNamespace(
        scheduled_new_reqs=[None] * admitted,
        total_num_scheduled_tokens=core.max_num_scheduled_tokens if tokens is None else tokens,
        scheduled_spec_decode_tokens={},
    )
    call(core, "schedule", lambda _: output, False)
    return StepPlan.of(output)


def drafts_of(core: Any) -> int:
    """K of the step scheduled last, as vLLM looks it up for any number of requests."""
    found = {core.dynamic_sd_lookup[reqs] for reqs in (1, 7, 1000)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("reqs", "engine", "expected"),
    [
        (1, {}, NODES), (31, {}, NODES), (500, {}, 3), (1024, {}, 1), (1500, {}, 0), (2048, {}, 0),
        (1, {"graph": 512}, NODES), (16, {"graph": 512}, 31), (513, {"graph": 512}, 0),
        (1, {"config": settings(8)}, 8), (400, {"config": settings(8)}, 4),
        (1, {"config": settings(0)}, 0),
        # Of a request's own two blocks, 29 slots are in use.
        (1, {"free": 12}, NODES), (1, {"free": 8}, 6 * BLOCK - 29 - 1 - (GAMMA + 1)),
        (2, {"free": 8}, 4 * BLOCK - 29 - 1 - (GAMMA + 1)), (4, {"free": 5}, 0),
        (1, {"free": 0}, 0),
    ],
)  # fmt: skip
def test_k_fits_the_step_the_largest_graph_and_the_cache(
    reqs: int, engine: dict[str, Any], expected: int
) -> None:
    core = new_core(**engine, **{str(i): new_request(drafts=1) for i in range(reqs)})
    plan = schedule(core)
    assert drafts_of(core) == expected
    assert plan.arm == (Arm.TREE if expected else Arm.PLAIN)
    rows = min(core.max_num_scheduled_tokens, engine.get("graph", 1 << 20))
    assert reqs * (1 + expected) <= max(rows, reqs)
    if expected == 0 and "config" not in engine:
        assert schedule(core).reason == "no room for drafts"


def test_the_arms_of_an_engine() -> None:
    every = (Arm.PLAIN, Arm.NGRAM, Arm.TREE)
    cases: list[tuple[Any, dict[str, Any], tuple[Arm, ...]]] = [
        ("adaptive", {}, every), (8, {}, (Arm.TREE,)), (0, {}, (Arm.PLAIN,)),
        ("adaptive", {"is_moe": True}, every), ("adaptive", {"data_parallel": 2}, every),
        # Ranks of experts step together, and each has a scheduler of its own.
        ("adaptive", {"is_moe": True, "data_parallel": 2}, (Arm.TREE,)),
    ]  # fmt: skip
    for budget, engine, arms in cases:
        chosen = settings(budget)
        scheduler = SimpleNamespace(vllm_config=engine_of(chosen, **engine), settings=chosen)
        assert _arms(scheduler) == arms
    chosen = settings()
    chosen.bastion_lookup = False
    scheduler = SimpleNamespace(vllm_config=engine_of(chosen), settings=chosen)
    assert _arms(scheduler) == (Arm.PLAIN, Arm.TREE)


def test_requests_of_one_salt_and_adapter_see_each_others_replies() -> None:
    chosen = settings()
    adapters = {None: None, "x": SimpleNamespace(lora_name="x")}
    kinds = [(salt, name) for salt in (None, "s", "t") for name in adapters] * 2
    requests = {f"r{i}": new_request(cache_salt=salt) for i, (salt, _) in enumerate(kinds)}
    core = new_core(config=chosen, **requests)

    def groups() -> list[int]:
        new = [
            SimpleNamespace(req_id=f"r{i}", lora_request=adapters[name])
            for i, (_, name) in enumerate(kinds)
        ]
        output = SimpleNamespace(scheduled_new_reqs=new, total_num_scheduled_tokens=9)
        call(core, "schedule", lambda _: output, False)
        found = StepPlan.of(output).ngram_groups
        return [found[f"r{i}"] for i in range(len(kinds))] if found else []

    assert groups() == [], "nothing is kept"
    chosen.bastion_ngram_cache = 100
    first, again = groups(), groups()
    assert first == again and all(0 < group < 1 << 63 for group in first)
    assert first[:6] == first[6:] and len(set(first)) == 6
    call(core, "reset_prefix_cache", lambda: True)
    assert not set(groups()) & set(first)


# --- prompts ----------------------------------------------------------------------------------


def crowded(prompt_tokens: int, waits: bool, **changes: Any) -> Any:
    """A core with one request that decodes, a prompt, and 99 tokens beside these two in a step."""
    prompt = new_request(num_computed_tokens=0, num_tokens=prompt_tokens, num_output_tokens=0)
    core = new_core(a=new_request(drafts=NODES), **({} if waits else {"p": prompt}))
    core.requests["p"] = prompt
    core.max_num_scheduled_tokens, core.waiting = 101, [prompt] if waits else []
    vars(core).update(changes)
    return core


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("tokens", "fills"), [(500, True), (100, True), (60, False)])
def test_nothing_is_drafted_for_a_step_that_prompts_fill(
    waits: bool, tokens: int, fills: bool
) -> None:
    core = crowded(tokens, waits)
    plan = schedule(core)
    assert (plan.arm, plan.prompts_wait) == (Arm.PLAIN if fills else Arm.TREE, fills)
    assert drafts_of(core) == (0 if fills else 101 // 2 - 1)
    # The step after it has no drafts to verify.
    assert schedule(core).verified == plan.arm
    if fills:
        assert schedule(core).reason == "prompts wait"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_active_reqs": 1}, {"_pause_state": PauseState.PAUSED_NEW},
        {"scheduler_config": SimpleNamespace(
            long_prefill_token_threshold=50, prefill_schedule_interval=1
        )},
    ],
    ids=["no seat", "pause", "a chunk at a time"],
)  # fmt: skip
def test_a_prompt_that_cannot_fill_the_step_does_not_stop_drafts(changes: dict[str, Any]) -> None:
    assert schedule(crowded(500, waits=True, **changes)).arm == Arm.TREE


def test_a_prompt_that_the_cache_has_no_room_for_does_not_stop_drafts() -> None:
    core = crowded(500, waits=True)
    # Tokens are left and it does not come in: the cache is full, until another request leaves.
    assert schedule(core, tokens=80).prompts_wait
    # Something else may have held it up, so there are steps without drafts later.
    found = [schedule(core, tokens=80).prompts_wait for _ in range(80)]
    assert not found[0] and 1 <= sum(found) <= 4
    core.running = []
    assert schedule(core, tokens=80).prompts_wait
    # Nothing follows where vLLM holds prompts back in most steps.
    core = crowded(500, waits=True)
    core.scheduler_config.prefill_schedule_interval = 4
    assert all(schedule(core, tokens=80).prompts_wait for _ in range(3))


# --- requests that can use no drafts ------------------------------------------------------------


def own_budget(nodes: int) -> Any:
    return SimpleNamespace(extra_args={"bastion_budget": nodes})


def test_nothing_is_drafted_where_no_request_can_use_it() -> None:
    none, last = {"sampling_params": own_budget(0)}, {"num_output_tokens": 98}
    for useless in ([none], [last], [none, last]):
        requests = {str(i): new_request(**more) for i, more in enumerate(useless)}
        core = new_core(**requests)
        assert (schedule(core).arm, drafts_of(core)) == (Arm.PLAIN, 0)
        assert schedule(core).reason == "no request can use drafts"
        core = new_core(**requests, other=new_request(sampling_params=own_budget(1)))
        assert schedule(core).arm == Arm.TREE


# --- placeholders of a request -------------------------------------------------------------------


def cut(core: Any) -> dict[str, int]:
    """Placeholders that vLLM's `schedule` finds after a step with N of each request."""
    schedule(core)
    shared = [-1] * NODES  # one list of all requests, as with async scheduling
    for request in core.running:
        request.spec_token_ids = shared
    schedule(core)
    assert len(shared) == NODES
    return {name: len(request.spec_token_ids) for name, request in core.requests.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_keep_their_own_limits(kind: Any) -> None:
    core = new_core(
        kind, a=new_request(), g=new_request(grammar=True), none=new_request(),
        few=new_request(sampling_params=own_budget(5)),
    )  # fmt: skip
    core.requests["none"].sampling_params = own_budget(0)
    assert cut(core) == {"a": NODES, "g": 16, "none": 0, "few": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_follow_k(kind: Any) -> None:
    """More requests run than when K was chosen, so each has room for less."""
    core = new_core(kind, a=new_request())
    core.max_num_scheduled_tokens = 128
    assert cut(core) == {"a": NODES}
    core.running += [new_request(request_id=str(i)) for i in range(3)]
    core.requests["a"].spec_token_ids = [-1] * NODES
    schedule(core)
    assert len(core.requests["a"].spec_token_ids) == 31
    core.state.choice.num_drafts = 0
    core.requests["a"].spec_token_ids = [-1] * 31
    schedule(core)
    assert core.requests["a"].spec_token_ids == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_step_leaves_the_choice_of_the_one_before(kind: Any) -> None:
    """The drafts that wait are those of the last step that ran, and so is their arm."""
    core = new_core(kind, a=new_request())
    schedule(core)
    before = core.state.choice
    assert before.arm == Arm.TREE
    core.max_num_scheduled_tokens = 1  # no room for drafts
    schedule(core, tokens=0)
    assert core.state.choice == before
    assert schedule(core, tokens=1).verified == Arm.TREE
    assert core.state.choice.arm == Arm.PLAIN


def test_a_full_cache_leaves_each_request_its_own_blocks() -> None:
    core = new_core(
        free=0, few=new_request(), some=new_request(blocks=5), many=new_request(blocks=9)
    )
    assert cut(core) == {"few": 0, "some": 5 * BLOCK - 29 - 1 - (GAMMA + 1), "many": NODES}


@pytest.mark.parametrize("left", [1, 2, 3, 4, 20, 21, 200])
def test_near_the_models_end_a_step_leaves_positions_for_the_next(left: int) -> None:
    for kind in KINDS:
        # Two tokens are computed for which no output has arrived.
        request = new_request(num_computed_tokens=31, num_output_placeholders=2)
        core = new_core(kind, a=request)
        core.max_model_len = 29 + left
        count = cut(core)["a"]
        if kind is BastionScheduler:
            assert count == NODES
        else:
            fitting = [n for n in range(NODES + 1) if 2 * (1 + n) <= left]
            assert count == max(fitting, default=0)
