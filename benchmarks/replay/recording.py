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
from numpy.typing import ArrayLike, NDArray

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

    def continuation(self, step: int, length: int | None = None) -> NDArray[np.int32]:
        """The next `length` (default D + 1) tokens of the target after a step's root."""
        q, p = int(self.step_requests[step]), int(self.step_positions[step])
        start = int(self.token_offsets[q]) + p
        end = start + (self.depth + 1 if length is None else length)
        return self.tokens[start : min(end, int(self.token_offsets[q + 1]))]

    def check(self) -> None:
        """Check that replay can read the recording.

        Raises ValueError: shapes disagree, scores are not sorted log-probabilities, or a step's
        continuation is shorter than D + 1 tokens.
        """
        reqs, m = len(self.request_ids), self.num_steps
        shape = (m, *self.topk_tokens.shape[1:])
        expected: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("domains", "temperatures", "prompt_lens"), (reqs,)),
            **dict.fromkeys(("step_positions", "context_lens"), (m,)),
            **dict.fromkeys(("topk_tokens", "topk_logprobs"), shape),
            "prompts": (int(self.prompt_lens.sum()),),
            "token_offsets": (reqs + 1,),
            "tokens": (int(self.token_offsets[-1]),),
        }
        wrong = [name for name, has in expected.items() if np.shape(getattr(self, name)) != has]
        if wrong or len(shape) != 3:
            raise ValueError(f"recording with shapes that disagree: {', '.join(wrong)}")
        logprobs = self.topk_logprobs
        if not (np.all(logprobs <= 0) and np.all(np.diff(logprobs, axis=2) <= 0)):
            raise ValueError("topk_logprobs must be <= 0 and non-increasing over K")
        left = np.diff(self.token_offsets)[self.step_requests] - self.step_positions
        if m and (left.min() < self.depth + 1 or self.step_positions.min() < 1):
            raise ValueError(
                f"a step at position p needs the root and tokens p .. p + {self.depth} of its "
                f"request; one has {int(left.min())} tokens left"
            )


class Emitted(NamedTuple):
    """A request, its prompt's tokens and all tokens that it emitted."""

    name: str
    domain: str
    temperature: float
    prompt: ArrayLike
    tokens: ArrayLike


class Drafted(NamedTuple):
    """A draft, made when `position` tokens were emitted: [D, K] and [D, K]."""

    name: str
    position: int
    topk_tokens: ArrayLike
    topk_logprobs: ArrayLike


def recording_of(
    meta: Mapping[str, Any], requests: Sequence[Emitted], drafts: Iterable[Drafted]
) -> Recording:
    """A recording of drafts in any order, without those that cannot be replayed.

    Those are of other requests, or too near the end of their own.

    Args:
        meta: identifies the run; must be JSON.
    """
    index = {request.name: q for q, request in enumerate(requests)}
    outputs = [np.asarray(request.tokens, dtype=np.int32) for request in requests]
    prompts = [np.asarray(request.prompt, dtype=np.int32) for request in requests]
    rows = []
    for draft in drafts:
        q, depth = index.get(draft.name), len(np.asarray(draft.topk_tokens))
        if q is not None and draft.position + depth + 1 <= len(outputs[q]):
            rows.append((q, draft.position, draft))
    rows.sort(key=lambda row: row[:2])
    prompt_lens = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    owners = np.array([q for q, *_ in rows], dtype=np.int32)
    positions = np.array([position for _, position, _ in rows], dtype=np.int32)

    def joined(texts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
        return np.concatenate([np.zeros(0, dtype=np.int32), *texts])

    def stacked(field: str, dtype: Any) -> NDArray[Any]:
        arrays = [np.asarray(getattr(draft, field), dtype=dtype) for *_, draft in rows]
        return np.stack(arrays) if arrays else np.zeros((0, 0, 0), dtype=dtype)

    return Recording(
        dict(meta),
        list(index),
        [request.domain for request in requests],
        np.array([request.temperature for request in requests], dtype=np.float32),
        prompt_lens,
        joined(prompts),
        np.cumsum([0, *map(len, outputs)], dtype=np.int64),
        joined(outputs),
        owners,
        positions,
        prompt_lens[owners] + positions - 1 if rows else positions,
        stacked("topk_tokens", np.int32),
        stacked("topk_logprobs", np.float16).astype(np.float32),
    )


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write atomically. Raises ValueError: see `Recording.check`."""
    recording.check()
    stored = dict(vars(recording))
    tokens = recording.topk_tokens
    small = not tokens.size or int(tokens.max()) < 1 << 16
    stored |= {
        "version": np.int32(FORMAT),
        "meta": np.array(json.dumps(recording.meta)),
        "request_ids": np.array(recording.request_ids, dtype=np.str_),
        "domains": np.array(recording.domains, dtype=np.str_),
        "topk_tokens": tokens.astype(np.uint16) if small else tokens,
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
