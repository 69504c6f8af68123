# SPDX-License-Identifier: Apache-2.0
"""Send requests to a server and read what it answers, streamed or not."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.soak.requests import Request

_TIMEOUT_S = 300


@dataclass
class Choice:
    """One completion; `logprobs` are those of its tokens."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: Any = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """What came back: a status, and the choices by their index.

    prompts: token ids of each choice's prompt. problem: what was wrong with the answer itself.
    timed_out: no answer came in time.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    message: str = ""
    cut: bool = False
    problem: str | None = None
    timed_out: bool = False


def send(port: int, request: Request) -> Answer:
    """Send a request to this machine's `port` and read the answer, or close the connection."""
    body = request.body if isinstance(request.body, str) else json.dumps(request.body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    answer, streamed = Answer(), bool(request.given.get("stream"))
    try:
        if request.cut is not None and not streamed:
            connection.timeout = request.cut / 100
        connection.request("POST", request.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if streamed and response.status == 200:
            _read_stream(response, request, answer)
        else:
            _read(json.loads(response.read()), answer)
    except TimeoutError:
        answer.cut = request.cut is not None
        answer.timed_out = not answer.cut
        answer.problem = f"no answer in {_TIMEOUT_S} s" if answer.timed_out else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    finally:
        _close(connection)
    return answer


def _close(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _read_stream(response: http.client.HTTPResponse, request: Request, answer: Answer) -> None:
    chunks = 0
    while True:
        line = response.readline().decode().strip()
        if line == "data: [DONE]":
            return
        if not line.startswith("data: "):
            if not line and response.isclosed():
                answer.problem = "the stream ended without [DONE]"
                return
            continue
        _read(json.loads(line.removeprefix("data: ")), answer)
        chunks += 1
        if request.cut is not None and chunks >= request.cut:
            answer.cut = True
            return


def _read(body: dict[str, Any], answer: Answer) -> None:
    """Add a whole response, or a chunk of one."""
    if "error" in body:
        answer.message = str(body["error"]["message"])
        if answer.status == 200:
            answer.problem = f"an error in the stream: {answer.message}"
        return
    for part in body.get("choices", ()):
        index = part["index"]
        choice = answer.choices.setdefault(index, Choice())
        message = part.get("message") or part.get("delta") or {}
        choice.tokens += part.get("token_ids") or []
        choice.text += part.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            choice.text += call["function"].get("arguments") or ""
        choice.finish = part.get("finish_reason") or choice.finish
        choice.stop = part["stop_reason"] if part.get("stop_reason") is not None else choice.stop
        logprobs = part.get("logprobs") or {}
        choice.logprobs += logprobs.get("token_logprobs") or [
            entry["logprob"] for entry in logprobs.get("content") or ()
        ]
        prompt = part.get("prompt_token_ids") or body.get("prompt_token_ids")
        if prompt:
            answer.prompts[index] = prompt
