# SPDX-License-Identifier: Apache-2.0
"""Prompts that wait: how much of a step they get, and when nothing is drafted for the next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.test_hooks import NODES, Core, _request, _settings, _step
from vllm_bastion import plugin
from vllm_bastion.carriers import StepPlan
from vllm_bastion.hooks import scheduler


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()


def test_a_prompt_takes_no_more_of_a_step_than_vllm_gives_it() -> None:
    core = Core(
        _settings(),
        a=_request(drafts=NODES),
        p=_request(num_computed_tokens=0, num_tokens=500),
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
    scheduler.schedule(lambda *_: output, core)
    assert StepPlan.of(output).backlog == backlog
