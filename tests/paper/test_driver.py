# SPDX-License-Identifier: Apache-2.0
"""The driver of `benchmarks.paper` over a fake engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from benchmarks.harness.driver import Driver
from benchmarks.harness.engine import Request
from helpers import ROOT


def test_an_engine_without_the_plugin_does_not_import_it() -> None:
    code = (
        "import sys, benchmarks.paper.__main__, benchmarks.harness.driver;"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm_bastion', 'bastion_kernels')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr


class _Output:
    def __init__(self, request_id: str, token_ids: list[int], finished: bool) -> None:
        self.request_id, self.finished = request_id, finished
        self.outputs = [type("Completion", (), {"token_ids": token_ids})()]


class _Scheduler:
    def update_from_output(self, scheduled: Any, output: Any) -> None:
        return None


class _Llm:
    """A fake engine: one step for the prompt, then two tokens per step and running request."""

    def __init__(self, length: int) -> None:
        self.length, self.running, self.most = length, {}, 0
        self.scheduler, self.model_executor = _Scheduler(), self
        self.llm_engine = self.engine_core = self.driver_worker = self.worker = self
        self.model_runner = type("Runner", (), {})()
        self.model_runner.model = type("Model", (), {})()
        self.model_runner.model.forward = lambda: None
        self.model_runner.model.compute_logits = lambda: None

    def add_request(self, name: str, prompt: str, params: Any) -> None:
        self.running[name] = []
        self.most = max(self.most, len(self.running))

    def step(self) -> list[_Output]:
        self.model_runner.model.forward()
        new = {name: [7] * (2 if ids else 1) for name, ids in self.running.items()}
        drafts = {name: [0] * 5 for name, ids in self.running.items() if ids}
        scheduled = type("Scheduled", (), {"scheduled_spec_decode_tokens": drafts})()
        scheduled.num_scheduled_tokens = {
            name: 6 if ids else 9 for name, ids in self.running.items()
        }
        output = type("Output", (), {"req_ids": list(new), "sampled_token_ids": [*new.values()]})()
        self.scheduler.update_from_output(scheduled, output)
        for name, ids in new.items():
            self.running[name] += ids
        done = [
            _Output(f"{name}-0", ids[: self.length], len(ids) >= self.length)
            for name, ids in self.running.items()
        ]
        self.running = {n: ids for n, ids in self.running.items() if len(ids) < self.length}
        return done


def test_a_drive_keeps_the_concurrency_and_leaves_prompts_out_of_the_steps() -> None:
    llm = _Llm(length=5)
    driver = Driver(llm)
    requests = [Request(str(i), "text", max_tokens=5) for i in range(5)]
    responses = driver.drive(requests, 2)
    assert llm.most == 2
    for response in responses:
        assert response.token_ids == [7] * 5
        # A step that ends its prompt, then two forwards of two tokens.
        assert (response.forwards, response.emitted, response.verified) == (2, 4, 10)
        # Requests 0 and 1 share steps, so do 2 and 3; 4 is alone. Two of three steps are decodes.
        assert response.steps == 2 and response.draft_ms == 0
        assert response.step_ms >= response.verify_ms > 0
        assert response.begin_s < response.first_s < response.end_s
    (again,) = driver.drive(requests[:1], 1)
    assert (again.steps, again.forwards) == (2, 2)
