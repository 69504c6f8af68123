# SPDX-License-Identifier: Apache-2.0
"""The recording that replay uses: the drafter's and the target's output at every position.

A recording holds, per request, its prompt and the tokens that the target emitted, and per step the
drafter's top-K at every drafted depth. Decoding is lossless and its noise is keyed by position, so
the emitted tokens do not depend on the verified tree, and the drafter's output depends on the
prefix alone. With a step recorded at *every* position, any policy can be replayed without a model.
The target emits `depth + 1` tokens past the last step. `benchmarks.smollm2.record` makes one.

One `.npz` (deflated) with, for Q requests, M steps, D depths and K candidates:

    version           ()        int32    FORMAT
    meta              ()        str      JSON: provenance
    request_ids       [Q]       str
    domains           [Q]       str
    temperatures      [Q]       float32
    prompt_lens       [Q]       int32
    prompts           [sum]     int32    their tokens, one request after the other
    token_offsets     [Q + 1]   int64    request q emitted tokens[offsets[q] : offsets[q + 1]]
    tokens            [sum]     int32
    step_requests     [M]       int32    which request
    step_positions    [M]       int32    p >= 1: emitted so far; the root is token p - 1
    topk_tokens       [M, D, K] uint16   best first
    topk_logprobs     [M, D, K] float16  log-probabilities, non-increasing over K

The target's continuation of a step is `tokens[offsets[q] + p :]`. float16 stores 3 digits of a
log-probability at half the size, far more precise than a drafter is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FORMAT = 2


@dataclass(frozen=True)
class Recording:
    """What replay reads of a recording; the fields are those of the file (see the module).

    Raises ValueError: scores are not sorted, or a step lacks tokens after it.
    """

    request_ids: list[str]
    domains: list[str]
    temperatures: NDArray[np.float32]
    prompt_lens: NDArray[np.int32]
    prompts: NDArray[np.int32]
    token_offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    step_requests: NDArray[np.int32]
    step_positions: NDArray[np.int32]
    topk_tokens: NDArray[np.int32]
    topk_logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        logprobs = self.topk_logprobs
        if not (np.all(logprobs <= 0) and np.all(np.diff(logprobs, axis=2) <= 0)):
            raise ValueError("topk_logprobs must be <= 0 and non-increasing over K")
        left = np.diff(self.token_offsets)[self.step_requests] - self.step_positions
        if left.min() < self.depth + 1:
            raise ValueError(
                f"a step needs {self.depth + 1} tokens after its root, not {left.min()}"
            )

    @property
    def depth(self) -> int:
        return self.topk_tokens.shape[1]


def load_recording(path: Path) -> Recording:
    """Read and check a recording. Raises ValueError: another format version, or see `Recording`."""
    with np.load(path, allow_pickle=False) as file:
        if "version" not in file or int(file["version"]) != FORMAT:
            raise ValueError(f"{path} is no recording of format {FORMAT}")
        stored = {field.name: file[field.name] for field in fields(Recording)}
    stored |= {name: stored[name].tolist() for name in ("request_ids", "domains")}
    stored["topk_tokens"] = stored["topk_tokens"].astype(np.int32)
    stored["topk_logprobs"] = stored["topk_logprobs"].astype(np.float32)
    return Recording(**stored)
