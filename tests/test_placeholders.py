# SPDX-License-Identifier: Apache-2.0
"""What placeholders leave to prompts, and to other requests' KV blocks."""

from __future__ import annotations

import pytest

from tests.test_hooks import NODES, Core, _request, _settings, _step
from vllm_bastion.carriers import SchedulerState


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
