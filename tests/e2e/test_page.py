# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion page` beside a real server, in a headless Chromium if there is one."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.e2e import cases
from tests.e2e.engines import Runner
from tests.e2e.marks import on_cpu
from tests.e2e.test_serving import SPECULATIVE, serving
from tests.page.browser import MISSING, Browser, find_chromium
from vllm_bastion.page import make_server

pytestmark = on_cpu("starts a CPU server", pytest.mark.slow)


def test_the_page_of_a_server(runner: Runner, tmp_path: Path) -> None:
    """Its numbers are the server's, and grow with the requests."""
    # A fixed budget: trees in every step, whatever this machine's step costs are.
    keys = {**SPECULATIVE, "num_speculative_tokens": 12, "bastion_budget": 12}
    options = ["--enforce-eager", "--max-num-seqs", "4"]
    with (
        serving(tmp_path / "log", runner.caches, *options, speculative=keys) as server,
        make_server(server.url) as page,
    ):
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}"

        def decode() -> None:
            body = {"prompt": cases.prompts()["chat"][3], "temperature": 0, "ignore_eos": True}
            server.post("/v1/completions", **body, max_tokens=60)

        decode()
        with urlopen(f"{url}/data") as answer:
            found = json.loads(answer.read())
        assert found["trees"] == server.counters()["drafts"] > 0
        assert found["nodes"] == server.counters()["draft_tokens"]
        assert found["tokens"] == 60 and found["gain"] is None
        assert ["tree", "fastest"] in [step[:2] for step in found["steps"]]
        if find_chromium() is None:
            pytest.skip(f"the server's part passed; {MISSING}")
        with Browser() as browser:
            browser.open(url)
            trees = "return +document.querySelector('[data-fact=trees] b')?.textContent"
            deadline = time.monotonic() + 120.0
            while browser.run(trees) != found["trees"]:
                assert time.monotonic() < deadline
                time.sleep(0.3)
            decode()
            while browser.run(trees) == found["trees"]:
                assert time.monotonic() < deadline
                time.sleep(0.3)
            browser.screenshot(tmp_path / "page.png")  # for a look at a failure
            assert browser.run("return document.querySelectorAll('#nodes path').length") == 2
            assert browser.run("return document.querySelectorAll('#depths rect').length") > 0
            text = browser.run("return document.getElementById('reasons').innerText")
            assert "fastest" in text
            assert browser.errors() == []
        page.shutdown()
