# SPDX-License-Identifier: Apache-2.0
"""An endless supply of random HTTP requests, right and wrong ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN = 512
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Tom"]}, "age": {"enum": [7, 44]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FIND = {"name": "find", "description": "d", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FIND}
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["one apple", "two pears", "none at all"]},
    {"regex": r"(ab|cd){2,12} [0-9]{2,6}"},
    {"json": _SCHEMA},
)
_LISTS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {"40": 3.0, "77": -5.0}},
    {"allowed_token_ids": list(range(2, 700))},
    {"stop_token_ids": [40, 41, 42, 43]},
    {"bad_words": ["the", "return"]},
    {"include_stop_str_in_output": True, "stop": ["e"]},
    {"vllm_xargs": {"bastion_budget": 3}},
    {"vllm_xargs": {"bastion_budget": 0}},
    {"skip_special_tokens": False},
)
# Each is refused with a status of its own; plain vLLM must give the same.
_WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"top_k": -5},
    {"min_p": 3},
    {"n": 0},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"max_tokens": 10 * MAX_MODEL_LEN},
    {"seed": "x"},
    {"presence_penalty": 9},
    {"repetition_penalty": 0},
    {"logprobs": 200},
    {"prompt_logprobs": -7},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"word": 1}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [5000]},
    {"min_tokens": 50, "max_tokens": 5},
    {"stop": 5},
    {"bad_words": [""]},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"response_format": {"type": "json_schema"}},
    {"model": "nobody"},
    {"prompt": [99999]},
    {"prompt": [5] * (MAX_MODEL_LEN + 5)},
    {"prompt": {"text": "x"}},
    {"prompt": None},
    {"priority": "soon"},
    {"stream_options": {"include_usage": True}},
    {"vllm_xargs": [1]},
)
_WRONG_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": "hi"},
    {"messages": [{"role": "user"}, 5]},
    {"messages": [{"content": "no role"}]},
    {"top_logprobs": 3},
    {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "("}},
)
# Refused by this plugin only.
_OURS: tuple[dict[str, Any], ...] = (
    {"vllm_xargs": {"bastion_budget": -1}},
    {"vllm_xargs": {"bastion_budget": "much"}},
    {"vllm_xargs": {"bastion_budget": 10_000}},
)


@dataclass(frozen=True)
class Request:
    """What is sent.

    Args:
        number: in the order in which requests are drawn.
        path: of the URL.
        body: JSON, or text that is none.
        kind: "right", "wrong", "ours" (wrong with this plugin only).
        cut: the client closes the connection after so many chunks, or, of a response that is not
            streamed, after so many hundredths of a second. None: it reads to the end.
    """

    number: int
    path: str
    body: dict[str, Any] | str
    kind: str = "right"
    cut: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return self.body if isinstance(self.body, dict) else {}

    @property
    def shown(self) -> dict[str, Any] | str:
        """The body without the model, which is a path."""
        if isinstance(self.body, str):
            return self.body
        return {key: value for key, value in self.body.items() if key != "model"}

    @property
    def repeatable(self) -> bool:
        """Whether plain decoding must give the same tokens."""
        decided = self.given.get("temperature") == 0 or "seed" in self.given
        return self.kind == "right" and self.cut is None and decided


class Requests:
    """The same requests for the same seed.

    Args:
        copying: share of the texts that end with a repetition of a piece of them, perhaps changed.
    """

    def __init__(self, model: str, prompts: list[str], seed: int, copying: float = 0.2) -> None:
        self._rng, self._copying = random.Random(seed), copying
        self._model, self._prompts = model, prompts
        self._last = prompts[0]
        self._count = 0

    def draw(self) -> Request:
        self._count += 1
        kind, rng = self._rng.random(), self._rng
        if kind < 0.08:
            return self._wrong()
        path = CHAT if kind < 0.3 else COMPLETIONS
        body = {**self._text(path), **self._sampling(), **self._wishes(path)}
        body["return_token_ids"] = True
        if rng.random() < 0.5:
            body["stream"] = True
        cut = rng.randint(1, 12) if rng.random() < 0.12 else None
        return Request(self._count, path, body, cut=cut)

    def _wrong(self) -> Request:
        rng, kind = self._rng, "wrong"
        which = rng.random()
        path = CHAT if which < 0.2 else COMPLETIONS
        body: dict[str, Any] | str = {**self._text(path), "max_tokens": 8, "temperature": 0}
        assert isinstance(body, dict)
        if which < 0.2:
            body |= rng.choice(_WRONG_CHATS)
        elif which < 0.85:
            body |= rng.choice(_WRONG)
        elif which < 0.95:
            body, kind = body | rng.choice(_OURS), "ours"
        else:
            body = rng.choice(('{"prompt": ', "", "[]", "null"))
        return Request(self._count, path, body, kind)

    def _text(self, path: str) -> dict[str, Any]:
        """A part of a prompt, of several joined ones, or of the last one again for prefix hits."""
        rng = self._rng
        if rng.random() > 0.4:
            self._last = rng.choice(self._prompts)
            while rng.random() < 0.4:
                self._last += rng.choice(self._prompts)
        text = self._last[: rng.randint(1, 700)]
        if rng.random() < self._copying:
            begin = rng.randrange(len(text))
            piece = text[begin : begin + rng.randint(20, 300)]
            if rng.random() < 0.5:
                piece = piece.replace(rng.choice(piece), rng.choice("aeiou "))
            text += "\n" + piece
        if path == CHAT:
            messages = [{"role": "user", "content": text}]
            if rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": "Answer shortly."})
            return {"model": self._model, "messages": messages}
        if rng.random() < 0.1:
            return {"model": self._model, "prompt": [text, rng.choice(self._prompts)]}
        return {"model": self._model, "prompt": text}

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 110),
            "temperature": 0,
            "ignore_eos": rng.random() < 0.7,
        }
        if rng.random() < 0.45:
            params["temperature"] = rng.choice((0.5, 0.8, 1.0))
            if rng.random() < 0.85:
                params["seed"] = rng.randrange(1 << 30)
            filters: tuple[dict[str, Any], ...] = (
                {}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.95, "top_k": 40}, {"min_p": 0.05},
            )  # fmt: skip
            params |= rng.choice(filters)
            if rng.random() < 0.15:
                params["n"] = 2
        return params

    def _wishes(self, path: str) -> dict[str, Any]:
        rng, out = self._rng, {}
        if rng.random() < 0.2:
            out["stop"] = rng.choice((["\n\n"], ["."], ["="], ["return", "So"]))
        if rng.random() < 0.3:
            out |= rng.choice(_LISTS)
        if rng.random() < 0.15:
            # The allowed tokens of a grammar are unknown to the judge: no other filter with it.
            out = {"structured_outputs": rng.choice(_GRAMMARS), "top_p": 1, "top_k": -1, "min_p": 0}
        elif path == CHAT and rng.random() < 0.15:
            choice = {"type": "function", "function": {"name": "find"}}
            out = {"tools": [_TOOL], "tool_choice": choice, "top_p": 1, "top_k": -1, "min_p": 0}
        if rng.random() < 0.15:
            out |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
        if rng.random() < 0.1:
            out["min_tokens"] = 1
        return out
