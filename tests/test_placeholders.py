# SPDX-License-Identifier: Apache-2.0
"""What placeholders leave to prompts, and to other requests' KV blocks; when none are drafted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.scheduler_core import call
from tests.test_hooks import NODES, Core, _request, _settings, _step
from vllm_bastion import plugin
from vllm_bastion.carriers import SchedulerState, StepPlan


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()


def test_prompts_come_before_nodes() -> None:
    for prompt_tokens, expected in ((500, 0), (60, 40)):
        prompt = _request(num_computed_tokens=0, num_tokens=prompt_tokens)
        core = Core(_settings(), a=_request(drafts=NODES), p=prompt)
        core.max_num_scheduled_tokens = 101
        assert _step(core) == {"a": expected, "p": 0}
        # One that waits is a prompt as well, where it may come in.
        for seats, share in ((1, NODES), (2, expected)):
            core = Core(_settings(), a=_request(drafts=NODES))
            core.max_num_scheduled_tokens, core.waiting = 101, [prompt]
            core.max_num_active_reqs = seats
            assert _step(core, tokens=101) == {"a": share}
    # All tokens are used up: it waits for its turn. There are some left and still it does not come
    # in: the cache is full, until another request leaves.
    core.requests["a"].spec_token_ids = [-1] * NODES
    assert _step(core, tokens=80) == {"a": 40}
    core.requests["a"].spec_token_ids = [-1] * NODES
    assert _step(core, tokens=80) == {"a": NODES}
    # Something else may have held it up, so the tokens are left again later.
    found = []
    for _ in range(40):
        core.requests["a"].spec_token_ids = [-1] * NODES
        found.append(_step(core, tokens=80)["a"])
    assert 1 <= found.count(40) <= 2 and found.count(NODES) == 40 - found.count(40)
    core.running, core.requests["a"].spec_token_ids = [], [-1] * NODES
    assert _step(core, admitted=1) and SchedulerState.of(core).blocked_at is None


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (100, {"a": NODES, "b": NODES}),
        # Rows 0 to 29 and 8 of the drafter fit into three blocks, with 10 nodes beside them.
        (9, {"a": NODES, "b": NODES}),
        (8, {"a": NODES, "b": 58}),
        (4, {"a": 58, "b": 10}),
        (1, {"a": 10, "b": 10}),
        (0, {"a": 10, "b": 10}),
    ],
)
def test_nodes_take_only_blocks_that_no_other_request_needs(
    free: int, expected: dict[str, int]
) -> None:
    core = Core(_settings(), a=_request(drafts=NODES), b=_request(drafts=NODES))
    for name, request in core.requests.items():
        request.request_id = name
    core.blocks.update(a=[1, 2, 3], b=[4, 5])  # b's own next tokens need one more
    core.free = free
    assert _step(core) == expected


def test_a_prompt_takes_no_more_of_a_step_than_vllm_gives_it() -> None:
    core = Core(
        _settings(), a=_request(drafts=NODES), p=_request(num_computed_tokens=0, num_tokens=500)
    )
    core.max_num_scheduled_tokens = 101
    core.scheduler_config.long_prefill_token_threshold = 50
    assert _step(core) == {"a": 50, "p": 0}


@pytest.mark.parametrize(("prompt_tokens", "backlog"), [(500, True), (50, False), (0, False)])
def test_workers_do_not_draft_for_a_step_that_prompts_will_fill(
    prompt_tokens: int, backlog: bool
) -> None:
    core = Core(_settings(), a=_request(drafts=NODES))
    core.max_num_scheduled_tokens = 101
    core.waiting = [_request(num_computed_tokens=0, num_tokens=prompt_tokens)]
    output = SimpleNamespace(
        scheduled_new_reqs=[], total_num_scheduled_tokens=101, scheduled_spec_decode_tokens={}
    )
    call(core, "schedule", lambda _: output, False)
    assert StepPlan.of(output).backlog == backlog
