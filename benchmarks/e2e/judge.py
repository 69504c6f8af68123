# SPDX-License-Identifier: Apache-2.0
"""Is a reply that differs from plain decoding's right too?

The shape of a batch changes how products are rounded, so where two tokens are equally good, plain
decoding itself does not always choose the same one. Plain decoding scores the two tokens of a first
difference. It is a near-tie if both are within `BOUND` of its best token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from benchmarks.e2e.store import Round, Store
from benchmarks.harness.engine import Engine
from benchmarks.harness.process import begun

# Of log-probabilities, as in the end-to-end tests: bfloat16's, and float32's.
BOUND, FLOAT32_BOUND = 0.25, 1e-4
_TOKENS = 20  # vLLM's largest default for `logprobs`


class Scorer:
    def __init__(self, engine: Engine) -> None:
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


def judge(
    store: Store,
    engine: Engine,
    prompt_and_reply: Callable[[Round, str], tuple[list[int], list[int]]],
    dtype: str,
) -> None:
    """Append a `judged` row for each greedy reply that differs; without any, no engine starts.

    Args:
        engine: of plain decoding.
        prompt_and_reply: a round and a prompt's id -> token ids of it, and plain decoding's reply.
    """
    done = {(row["method"], Round.of(row), row["id"]) for row in store.of_kind("judged")}
    open_ones = [
        (row["method"], Round.of(row), name, *difference)
        for row in store.of_kind("round")
        if row["temperature"] == 0
        for name, difference in row.get("differs", {}).items()
        if (row["method"], Round.of(row), name) not in done
    ]
    if not open_ones:
        return
    bound = FLOAT32_BOUND if dtype == "float32" else BOUND
    engine = replace(engine, speculative=None, max_num_seqs=1)
    with begun(engine) as process:
        process.answer()
        process.start(Scorer, engine)
        process.answer()
        for method, this, name, at, token in tqdm(open_ones, desc="near-ties", disable=None):
            prompt, reply = prompt_and_reply(this, name)
            tokens = [[*reply, None][at], token]
            # Where one text ends and the other goes on, there is no token to score.
            near_tie = False
            if None not in tokens:
                process.call("gaps", [*prompt, *reply[:at]], tokens)
                near_tie = max(process.answer()) < bound
            own: dict[str, Any] = {"kind": "judged", **this._asdict(), "method": method, "id": name}
            store.append(own | {"near_tie": near_tie})
