# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for besides tokens: `--kinds` of `python -m benchmarks.e2e`."""

from __future__ import annotations

from typing import Any

_JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"enum": [7, 44]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "14 tokens": {"max_tokens": 14},
    "presence 1.5": {"presence_penalty": 1.5},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "bad words": {"bad_words": ["the", "return", "="]},
    "logprobs 5": {"logprobs": 5},
    "min tokens": {"min_tokens": 32},
    "JSON": {"structured_outputs": {"json": _JSON}},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{40,80}\."}},
}
