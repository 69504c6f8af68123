# SPDX-License-Identifier: Apache-2.0
"""The page in a headless Chromium with a real server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import TARGET, Runner
from tests.e2e.marks import on_cpu
from tests.e2e.test_serving import SPECULATIVE, Server, serving
from tests.page.browser import MISSING, Browser, find_chromium
from vllm_bastion.telemetry.seen_trees import LOOK_S

pytestmark = on_cpu("starts a CPU server", pytest.mark.slow)
EVIL = "<script>document.title='owned'</script>"
EVIL_ID = 1023


@pytest.fixture
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip(MISSING)
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target, with a token whose text is a script element."""
    folder = tmp_path_factory.mktemp("page") / "target"
    shutil.copytree(TARGET, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    # The last token that was merged is a part of no other.
    (old,) = (text for text, token in model["vocab"].items() if token == EVIL_ID)
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != old]
    assert not any(old in pair for pair in model["merges"])
    del model["vocab"][old]
    model["vocab"][EVIL] = EVIL_ID
    path.write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture(scope="module")
def server(
    runner: Runner, target: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    variables = {**runner.caches, "VLLM_BASTION_PAGE": "1"}
    # A fixed budget: trees in every step, whatever this machine's step costs are.
    keys = {**SPECULATIVE, "num_speculative_tokens": 12, "bastion_budget": 12}
    options = ["--enforce-eager", "--max-num-seqs", "4", "--served-model-name", TARGET]
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, variables, *options, speculative=keys, target=target) as running:
        yield running


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.3)


def test_the_page_lives_while_requests_run(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    """It loads, its numbers grow with the requests, and a token `<script>` is text."""
    browser.open(server.url + "/bastion")
    trees = "+document.querySelector('[data-fact=trees] b')?.textContent"
    _until(lambda: browser.run("return +document.documentElement.dataset.polls >= 2"))
    before = browser.run(f"return {trees}")
    prompt = cases.prompts()["chat"][3]
    load = Thread(target=lambda: [
        server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=60, ignore_eos=True)
        for _ in range(6)
    ])  # fmt: skip
    load.start()
    _until(lambda: browser.run(f"return {trees}") > before)
    load.join()
    browser.screenshot(tmp_path / "page.png")  # for a look at a failure
    # What the target must say, whatever is drafted.
    for _ in range(2):
        server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=12,
                    allowed_token_ids=[EVIL_ID])  # fmt: skip
        time.sleep(1.2)
    text = "return document.getElementById('trees').innerText"
    _until(lambda: EVIL in browser.run(text))
    shown = browser.run(text)
    assert "●" in shown and "○" in shown
    assert browser.run("return document.title") == "vllm-bastion"
    assert browser.run("return document.scripts.length") == 2
    assert browser.run("return document.querySelectorAll('#nodes path').length") == 2
    assert browser.run("return document.querySelectorAll('#depths rect').length") > 0
    assert "fixed budget" in browser.run("return document.getElementById('reasons').innerText")
    assert browser.errors() == []
    total = json.loads(server.get("/v1/bastion"))
    assert browser.run(f"return {trees}") <= total["trees"]
    assert total["trees"] == server.counters()["drafts"]


def test_nothing_is_collected_while_nobody_looks(server: Server) -> None:
    """Steps of a time without polls leave no tree; the next poll starts anew."""
    server.get("/v1/bastion")
    time.sleep(LOOK_S + 1)
    seen = {tree["request"] for tree in json.loads(server.get("/v1/bastion"))["page"]["trees"]}
    time.sleep(LOOK_S + 1)
    answer = server.post("/v1/completions", prompt="x = ", temperature=0, max_tokens=30)
    data = json.loads(server.get("/v1/bastion"))
    assert {tree["request"] for tree in data["page"]["trees"]} <= seen
    answer = server.post("/v1/completions", prompt="y = ", temperature=0, max_tokens=30)
    trees = json.loads(server.get("/v1/bastion"))["page"]["trees"]
    assert any(tree["request"].startswith(answer["id"]) for tree in trees)
