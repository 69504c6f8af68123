# SPDX-License-Identifier: Apache-2.0
"""Tell near-ties from errors, by plain decoding's own log-probabilities.

Two engines that batch a row differently round its logits differently, and if two tokens are equally
good, either may win. Plain vLLM scores the two tokens at a response's first difference, in the
engine's own type. A difference is a near-tie if both are within the bound of the best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tqdm import tqdm

from benchmarks.harness.decoder import engine_of
from benchmarks.paper.store import Key, Row, Store

# Of log-probabilities, as in the end-to-end tests: bfloat16's, and float32's.
BOUND, FLOAT32_BOUND = 0.25, 1e-4
_TOKENS = 20  # vLLM's largest default for `logprobs`


class Scorer:
    def __init__(self, engine: Any) -> None:
        from vllm import LLM

        self._llm = LLM(**engine.arguments())

    def gaps(self, prompt_ids: list[int], tokens: list[int]) -> list[float]:
        """How far each token's log-probability is below the best one's; infinite beyond 20."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=_TOKENS)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
        (found,) = output.outputs[0].logprobs
        best = max(entry.logprob for entry in found.values())
        missing = float("-inf")
        return [best - (found[t].logprob if t in found else missing) for t in tokens]


def to_judge(store: Store) -> list[tuple[Key, Row]]:
    """Greedy responses that differ from plain decoding's and are not judged yet."""
    done = {Key.of(row) for row in store.of_kind("judged")}
    return [
        (key, row)
        for key, row in store.responses().items()
        if key.temperature == 0 and row.get("differs_at") is not None and key not in done
    ]


def judge(store: Store, engine: Any, request_of: Any, dtype: str) -> None:
    """Append a `judged` row for each open question; without any, no engine starts.

    Args:
        engine: of plain decoding.
        request_of: a key -> the token ids of its prompt, and plain decoding's of its reply.
    """
    rows = to_judge(store)
    if not rows:
        return
    with engine_of(replace(engine, speculative=None, max_num_seqs=1), Scorer) as process:
        for key, row in tqdm(rows, desc="near-ties", disable=None):
            prompt, reply = request_of(key)
            at = row["differs_at"]
            tokens = [[*reply, None][at], row["token"]]
            # Where one text ends and the other goes on, there is no token to score.
            tied = None not in tokens and is_near_tie(
                process, [*prompt, *reply[:at]], tokens, dtype
            )
            store.append({"kind": "judged", **key._asdict(), "near_tie": tied})


def is_near_tie(process: Any, ids: list[int], tokens: list[int], dtype: str) -> bool:
    """Whether tokens are about equally good after `ids`; process: an engine's with a `Scorer`."""
    process.call("gaps", ids, tokens)
    return max(process.answer()) < (FLOAT32_BOUND if dtype == "float32" else BOUND)
