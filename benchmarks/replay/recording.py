# SPDX-License-Identifier: Apache-2.0
"""The recording that replay uses: the drafter's and the target's output at every position.

A recording holds, per request, its prompt and the tokens that the target emitted, and per step the
drafter's top-K at every drafted depth. Decoding is lossless and its noise is keyed by position, so
the emitted tokens do not depend on the verified tree, and the drafter's output depends on the
prefix alone. With a step recorded at *every* position, any policy can be replayed without a model.
Therefore record with nothing verified (one token per step), and let the target run `depth + 1`
tokens past the last step.

One `.npz` (deflated) with, for Q requests, M steps, D depths and K candidates:

    version           ()        int32    FORMAT
    meta              ()        str      JSON: models, vLLM version, command, seed
    request_ids       [Q]       str
    domains           [Q]       str
    temperatures      [Q]       float32
    prompt_lens       [Q]       int32
    prompts           [sum]     int32    their tokens, one request after the other
    token_offsets     [Q + 1]   int64    request q emitted tokens[offsets[q] : offsets[q + 1]]
    tokens            [sum]     int32
    step_requests     [M]       int32    which request
    step_positions    [M]       int32    p >= 1: emitted so far; the root is token p - 1
    context_lens      [M]       int32    cached tokens before the root: prompt_len + p - 1
    topk_tokens       [M, D, K] int32    (uint16 on disk where they fit), best first
    topk_logprobs     [M, D, K] float16  log-probabilities, non-increasing over K

The target's continuation of a step is `tokens[offsets[q] + p :]`. float16 stores 3 digits of a
log-probability at half the size, far more precise than a drafter is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT = 2


@dataclass(frozen=True)
class Recording:
    """A recording in memory; the fields are those of the file (see the module)."""

    meta: dict[str, Any]
    request_ids: list[str]
    domains: list[str]
    temperatures: NDArray[np.float32]
    prompt_lens: NDArray[np.int32]
    prompts: NDArray[np.int32]
    token_offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    step_requests: NDArray[np.int32]
    step_positions: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    topk_tokens: NDArray[np.int32]
    topk_logprobs: NDArray[np.float32]

    @property
    def depth(self) -> int:
        return self.topk_tokens.shape[1]

    @property
    def num_steps(self) -> int:
        return len(self.step_requests)

    def check(self) -> None:
        """Raises ValueError: scores are not sorted, or a step lacks tokens after it."""
        logprobs = self.topk_logprobs
        if not (np.all(logprobs <= 0) and np.all(np.diff(logprobs, axis=2) <= 0)):
            raise ValueError("topk_logprobs must be <= 0 and non-increasing over K")
        left = np.diff(self.token_offsets)[self.step_requests] - self.step_positions
        if len(left) and left.min() < self.depth + 1:
            raise ValueError(
                f"a step needs {self.depth + 1} tokens after its root, not {left.min()}"
            )


class Emitted(NamedTuple):
    """A request, its prompt's tokens and all tokens that it emitted."""

    name: str
    domain: str
    temperature: float
    prompt: Sequence[int]
    tokens: Sequence[int]


class Drafted(NamedTuple):
    """A draft, made when `position` tokens were emitted: [D, K] and [D, K]."""

    name: str
    position: int
    topk_tokens: Any
    topk_logprobs: Any


def recording_of(
    meta: Mapping[str, Any], requests: Sequence[Emitted], drafts: Iterable[Drafted]
) -> Recording:
    """A recording of drafts in any order, without those that cannot be replayed.

    Those are of other requests, or too near the end of their own.

    Args:
        meta: identifies the run; must be JSON.
    """
    index = {request.name: q for q, request in enumerate(requests)}
    rows = sorted(
        (
            (index[one.name], one.position, one)
            for one in drafts
            if one.name in index
            and one.position + len(one.topk_tokens) < len(requests[index[one.name]].tokens)
        ),
        key=lambda row: row[:2],
    )
    owners, positions = np.array([row[:2] for row in rows], dtype=np.int32).reshape(-1, 2).T
    prompt_lens = np.array([len(request.prompt) for request in requests], dtype=np.int32)
    return Recording(
        dict(meta),
        list(index),
        [request.domain for request in requests],
        np.array([request.temperature for request in requests], dtype=np.float32),
        prompt_lens,
        np.concatenate([request.prompt for request in requests]).astype(np.int32),
        np.cumsum([0, *(len(request.tokens) for request in requests)], dtype=np.int64),
        np.concatenate([request.tokens for request in requests]).astype(np.int32),
        owners,
        positions,
        prompt_lens[owners] + positions - 1,
        np.array([row[2].topk_tokens for row in rows], dtype=np.int32),
        np.array([row[2].topk_logprobs for row in rows], dtype=np.float16).astype(np.float32),
    )


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write atomically. Raises ValueError: see `Recording.check`."""
    recording.check()
    tokens = recording.topk_tokens
    stored: dict[str, Any] = vars(recording) | {
        "version": np.int32(FORMAT),
        "meta": json.dumps(recording.meta),
        "topk_tokens": tokens.astype(np.uint16) if tokens.max(initial=0) < 1 << 16 else tokens,
        "topk_logprobs": recording.topk_logprobs.astype(np.float16),
    }
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, **stored)
    os.replace(temporary, path)


def load_recording(path: str | Path) -> Recording:
    """Read and check a recording.

    Raises ValueError: another format version, or see `Recording.check`.
    """
    with np.load(path, allow_pickle=False) as file:
        if "version" not in file or int(file["version"]) != FORMAT:
            raise ValueError(f"{path} is no recording of format {FORMAT}")
        stored = {name: file[name] for name in file if name != "version"}
    stored |= {
        "meta": json.loads(str(stored["meta"])),
        "request_ids": [str(name) for name in stored["request_ids"]],
        "domains": [str(name) for name in stored["domains"]],
        "topk_tokens": stored["topk_tokens"].astype(np.int32),
        "topk_logprobs": stored["topk_logprobs"].astype(np.float32),
    }
    recording = Recording(**stored)
    recording.check()
    return recording
