# SPDX-License-Identifier: Apache-2.0
"""Collects what a run drafted and emitted into a recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.replay.recording import Recording, save_recording

# request id, position, candidates, their log-probabilities, transitions
_Step = tuple[str, int, NDArray[np.int32], NDArray[np.float16], NDArray[np.float16] | None]


class RecordingWriter:
    """Collects requests and steps in any order and writes the file.

    Args:
        meta: identifies the run; must be JSON.
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self._meta = dict(meta)
        self._requests: dict[str, tuple[str, float, int]] = {}
        self._outputs: dict[str, NDArray[np.int32]] = {}
        self._steps: list[_Step] = []

    def add_request(
        self, request_id: str, *, domain: str, temperature: float, prompt_len: int
    ) -> None:
        """Add a request."""
        self._requests[request_id] = (domain, float(temperature), int(prompt_len))

    def add_step(
        self,
        request_id: str,
        position: int,
        topk_tokens: ArrayLike,
        topk_logprobs: ArrayLike,
        transitions: ArrayLike | None = None,
    ) -> None:
        """One draft.

        Args:
            request_id: a request that was added.
            position: tokens emitted when it was drafted; the last of them is the root.
            topk_tokens: [D, K] token ids, best first.
            topk_logprobs: [D, K] their log-probabilities.
            transitions: [D, K, K] log-probability of each candidate given each one of the depth
                above; for every step or for none.
        """
        tokens = np.asarray(topk_tokens, dtype=np.int32)
        logprobs = np.asarray(topk_logprobs, dtype=np.float16)
        if transitions is not None:
            transitions = np.asarray(transitions, dtype=np.float16)
        self._steps.append((request_id, int(position), tokens, logprobs, transitions))

    def finish_request(self, request_id: str, output_tokens: ArrayLike) -> None:
        """All tokens that the request emitted."""
        self._outputs[request_id] = np.asarray(output_tokens, dtype=np.int32)

    def recording(self) -> Recording:
        """The recording, without steps too near the end of their request."""
        ids = [name for name in self._requests if name in self._outputs]
        index = {name: q for q, name in enumerate(ids)}
        outputs = [self._outputs[name] for name in ids]
        info = [self._requests[name] for name in ids]
        depth = self._steps[0][2].shape[0] if self._steps else 0
        steps = [
            step
            for step in self._steps
            if step[0] in index and step[1] + depth + 1 <= len(self._outputs[step[0]])
        ]
        steps.sort(key=lambda step: (index[step[0]], step[1]))
        prompt_lens = np.array([prompt_len for *_, prompt_len in info], dtype=np.int32)
        requests = np.array([index[step[0]] for step in steps], dtype=np.int32)
        positions = np.array([step[1] for step in steps], dtype=np.int32)
        empty = np.zeros((0, depth, 0))
        after = [s[4] for s in steps if s[4] is not None]
        return Recording(
            meta=self._meta,
            request_ids=ids,
            domains=[domain for domain, *_ in info],
            temperatures=np.array([temperature for _, temperature, _ in info], dtype=np.float32),
            prompt_lens=prompt_lens,
            token_offsets=np.cumsum([0, *(len(output) for output in outputs)], dtype=np.int64),
            tokens=np.concatenate(outputs) if outputs else np.zeros(0, dtype=np.int32),
            step_requests=requests,
            step_positions=positions,
            context_lens=prompt_lens[requests] + positions - 1 if len(steps) else positions,
            topk_tokens=np.stack([s[2] for s in steps]) if steps else empty.astype(np.int32),
            topk_logprobs=(
                np.stack([s[3] for s in steps]).astype(np.float32)
                if steps
                else empty.astype(np.float32)
            ),
            transitions=np.stack(after) if after else None,
        )

    def save(self, path: str | Path) -> None:
        """Check the recording and write it."""
        save_recording(self.recording(), path)
