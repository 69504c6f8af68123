# SPDX-License-Identifier: Apache-2.0
"""The page as a document and as an endpoint: escapes, policy, keys, and trees while one looks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_bastion.hooks.server import load_endpoint_plugins
from vllm_bastion.page.document import content_security_policy, decoded, html, with_data
from vllm_bastion.page.endpoint import BastionPage
from vllm_bastion.telemetry.record import StepRecord, Totals
from vllm_bastion.telemetry.seen_trees import KEPT, LOOK_S, PER_LOOK, SeenTree, SeenTrees

EVIL = ["</script><script>document.title=1</script>", "<!--<script>", "]]>", "\u2028", "&lt;", "\\"]


def tree(request: str = "r", nodes: int = 6) -> SeenTree:
    return SeenTree(request, 0, list(range(nodes)), [0] * nodes, [0.5] * nodes, [1], [0, 9])


def snapshot() -> dict[str, Any]:
    totals = Totals()
    totals.add([StepRecord("tree", "pays", 1, 7, [6], [1])])
    seen = SeenTrees()
    seen.look()
    seen.add(tree())
    page = {"target": EVIL[0], "drafter": "d", "trees": seen.look()}
    return {**totals.to_plain(), "accepted_by_depth": [1], "gain": None, "page": page}


class Scripts(HTMLParser):
    """Texts of the script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._inside = tag == "script"
        self.texts += [""] * self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def test_data_in_a_file_cannot_leave_their_element() -> None:
    shown = decoded(snapshot(), 1.0, lambda token: EVIL[token % len(EVIL)])
    data, script = Scripts(with_data([shown])).texts
    assert json.loads(data) == [json.loads(json.dumps(shown))]
    assert json.loads(data)[0]["page"]["trees"][0]["tokens"] == EVIL
    assert not set("<>&") & set(data)
    assert script == Scripts(html()).texts[1]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = html()
    hosts = page.replace("http://www.w3.org/2000/svg", "")
    assert "://" not in hosts and "innerHTML" not in page and "eval(" not in page
    policy = content_security_policy()
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]


class Engine:
    """A front end's side of an engine."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def collective_rpc(self, method: str, timeout: float) -> list[Any]:
        assert method == "bastion_snapshot"
        return self.answers

    def get_tokenizer(self) -> Engine:
        return self

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return f"<{tokens[0]}>"


def client(answers: list[Any], **middleware: Any) -> TestClient:
    app, plugin = FastAPI(), BastionPage()
    plugin.attach_router(app)
    if middleware:
        app.add_middleware(AuthenticationMiddleware, **middleware)
    app.state.bastion_engine = Engine(answers)
    return TestClient(app)


def test_the_endpoint_answers_with_texts() -> None:
    server = client([None, snapshot()])
    page = server.get("/bastion")
    assert page.text == html()
    assert page.headers["content-security-policy"] == content_security_policy()
    body = server.get("/v1/bastion").json()
    assert body["page"]["trees"][0]["tokens"] == [f"<{token}>" for token in range(6)]
    assert body["seconds"] > 0 and body["trees"] == 1


def test_the_page_links_to_docs_that_the_server_has() -> None:
    names = re.search(r"for \(const name of (\[.*?\])\)", html())
    assert names is not None
    server, folder = client([]), Path(__file__).parents[2] / "docs"
    for name in json.loads(names[1]):
        text = server.get(f"/bastion/docs/{name}.md").text
        assert text == (folder / f"{name}.md").read_text()
    assert server.get("/bastion/docs/nothing.md").status_code == 404
    assert server.get("/bastion/docs/..%2F__init__.py").status_code == 404


def test_data_need_the_servers_key_and_the_page_does_not() -> None:
    server = client([snapshot()], tokens=["secret"])
    assert server.get("/bastion").status_code == 200
    assert server.get("/v1/bastion").status_code == 401
    allowed = server.get("/v1/bastion", headers={"Authorization": "Bearer secret"})
    assert allowed.status_code == 200


def test_a_server_without_the_method_says_so() -> None:
    answer = client([None]).get("/v1/bastion")
    assert answer.status_code == 404 and 'method "bastion"' in answer.json()["error"]


@pytest.mark.parametrize(
    ("value", "tasks", "count"),
    [(None, ("generate",), 0), ("0", ("generate",), 0), ("1", ("generate",), 1),
     ("1", ("embed",), 0), ("1", None, 0)],
)  # fmt: skip
def test_there_is_no_page_unless_asked_for(
    value: str | None, tasks: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BASTION_PAGE", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BASTION_PAGE", value)
    assert len(load_endpoint_plugins(lambda supported: [], tasks)) == count


def test_trees_are_kept_for_a_while_after_a_look() -> None:
    now = 0.0
    seen = SeenTrees(lambda: now)
    assert not seen.wanted()
    assert seen.look() == [] and seen.wanted()
    for _ in range(PER_LOOK):
        assert seen.wanted()
        seen.add(tree())
    assert not seen.wanted(), "a look is worth a few trees"
    assert len(seen.look()) == PER_LOOK and seen.wanted()
    now = LOOK_S
    assert not seen.wanted(), "nobody has looked for some seconds"
    for _ in range(2 * KEPT):
        seen.add(tree())
    assert len(seen.look()) == KEPT


def test_one_request_is_followed_while_it_has_trees() -> None:
    seen = SeenTrees()
    assert seen.choose(["a", "b"], [0, 0]) is None and seen.choose([], []) is None
    assert seen.choose(["a", "b", "c"], [3, 9, 4]) == 1
    seen.add(tree("c"))
    assert seen.choose(["a", "b", "c"], [3, 9, 4]) == 2
    assert seen.choose(["a", "b", "c"], [3, 9, 0]) == 1
