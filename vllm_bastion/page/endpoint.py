# SPDX-License-Identifier: Apache-2.0
"""The endpoint plugin of vLLM's API server: `GET /bastion`, its data, and the docs it links to.

The data are below `/v1`, which vLLM guards with `--api-key`; the page and the docs hold none.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from vllm_bastion.page.document import content_security_policy, decoded, docs, html

PAGE_PATH, DATA_PATH, DOCS_PATH = "/bastion", "/v1/bastion", "/bastion/docs/{name}"
# A worker answers between two steps; one that is stuck must not keep the request.
_TIMEOUT_S = 10.0
_NO_DATA = 'this server does not decode with method "bastion", or VLLM_BASTION_TELEMETRY is 0'


class BastionPage:
    """Satisfies `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "bastion_page"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, answer in ((PAGE_PATH, _page), (DATA_PATH, _data), (DOCS_PATH, _docs)):
            app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine."""
        state.bastion_engine = engine_client


async def _page() -> HTMLResponse:
    headers = {
        "Content-Security-Policy": content_security_policy(),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(html(), headers=headers)


async def _docs(name: str) -> PlainTextResponse:
    if name not in docs():
        raise HTTPException(404, f"there is no page {name}; there are {', '.join(docs())}")
    return PlainTextResponse(docs()[name], headers={"X-Content-Type-Options": "nosniff"})


async def _data(request: Request) -> JSONResponse:
    engine: Any = request.app.state.bastion_engine
    answers = await engine.collective_rpc("bastion_snapshot", timeout=_TIMEOUT_S)
    found = next((one for one in answers if one is not None and "page" in one), None)
    if found is None:
        return _answer({"error": _NO_DATA}, 404)
    tokenizer = engine.get_tokenizer()

    def text(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return _answer(decoded(found, time.time(), text), 200)


def _answer(content: dict[str, Any], status: int) -> JSONResponse:
    return JSONResponse(content, status, headers={"Cache-Control": "no-store"})
