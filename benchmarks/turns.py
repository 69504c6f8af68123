# SPDX-License-Identifier: Apache-2.0
"""What the controller adds: one engine under load, whose ways to decode take turns of a second.

    python -m benchmarks.turns [--pair tiny] [--concurrency 8] [--tokens 21 106] [--seconds 60]

    never       nothing is drafted: what plain steps of this engine cost
    adaptive    as a user has it
    drafts      as a user has it, without lookup

Requests stay in flight while the way changes, and a new one arrives for each that ends. All ways
share an engine: two starts of one commit differ by 5% to 20% on a small machine, two turns of a
second by far less. Costs and gains are learned in all turns. Nothing else may run on the machine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import TINY, parser_of
from benchmarks.harness.decoder import model_runner
from benchmarks.harness.engine import Request, UserEngine
from benchmarks.harness.switched import ADAPTIVE, NEVER
from benchmarks.paper.arguments import pair_dtype, pair_folder
from benchmarks.prompts import load_prompts

DRAFTS = "drafts"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Seconds of a turn, and those before it, which are not counted: the first trees are from the turn
# before.
_TURN_S, _SETTLE_S = 1.0, 0.1
_WARM_UP_S = 3.0


class Turns:
    """Decodes in turns. `rates`: seconds, tokens and steps of each turn, by way."""

    def __init__(self, llm: Any, requests: Callable[[], Request], at_once: int) -> None:
        self._engine, self._requests, self._at_once = llm.llm_engine, requests, at_once
        self._sent = 0
        # Tokens of each running request that the user has got.
        self._received: dict[str, int] = {}
        self._way = NEVER
        self.rates: dict[str, list[tuple[float, int, int]]] = {}
        self.reasons: dict[str, dict[str, int]] = {}
        self._switch(model_runner(llm).adaptive_verification.runtime.controller)

    def _switch(self, controller: Any) -> None:
        plan, looks_up = controller.plan, controller.looks_up

        def planned(batch: Any) -> Any:
            controller.looks_up = looks_up and self._way != DRAFTS
            decision = plan(batch)
            reasons = self.reasons.setdefault(self._way, {})
            reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
            if decision.replies_end or self._way != NEVER:
                return decision
            return replace(decision, drafts=False, looks_up=False)

        controller.plan = planned

    def _decode(self, seconds: float) -> tuple[float, int, int]:
        """Seconds, tokens and steps."""
        engine, tokens, steps, begin = self._engine, 0, 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds:
            while engine.get_num_unfinished_requests() < self._at_once:
                request, self._sent = self._requests(), self._sent + 1
                name = str(self._sent)
                engine.add_request(name, request.vllm_prompt(), request.sampling_params())
            for output in engine.step():
                received = len(output.outputs[0].token_ids)
                tokens += received - self._received.get(output.request_id, 0)
                self._received[output.request_id] = received
                if output.finished:
                    del self._received[output.request_id]
            steps += 1
        return passed, tokens, steps

    def run(self, ways: Sequence[str], seconds: float) -> None:
        """Decode in each way, back and forth, for about as many seconds in all."""
        for self._way in ways:
            self._decode(_WARM_UP_S)
        self.reasons.clear()
        for turn in range(max(1, round(seconds / _TURN_S / len(ways)))):
            for self._way in ways if turn % 2 == 0 else ways[::-1]:
                self._decode(_SETTLE_S)
                self.rates.setdefault(self._way, []).append(self._decode(_TURN_S))

    def table(self) -> str:
        """A row for each way, over `NEVER`: the ratio of all tokens per second, and its error."""
        lines = ["| | tokens/s | ms a step | over never | error | trials |", "|---" * 6 + "|"]
        base = np.array(self.rates[NEVER])
        for way, turns in self.rates.items():
            seconds, tokens, steps = np.array(turns).T
            ratio = tokens.sum() / seconds.sum() / (base[:, 1].sum() / base[:, 0].sum())
            each = tokens / seconds / (base[:, 1] / base[:, 0])
            reasons = self.reasons[way]
            trials = sum(n for why, n in reasons.items() if why.startswith("trial"))
            lines.append(
                f"| {way} | {tokens.sum() / seconds.sum():.0f} "
                f"| {1e3 * seconds.sum() / steps.sum():.2f} | {ratio:.3f} "
                f"| {each.std() / len(each) ** 0.5:.3f} | {trials / sum(reasons.values()):.1%} |"
            )
        return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pair", default="tiny", help="tiny, hybrid or a shape of widen")
    parser.add_argument("--drafter", help="a folder beside the pair's drafter")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", nargs=2, type=int, default=[21, 106], help="of a reply")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    os.environ.update({**_ENVIRONMENT, **os.environ})
    from vllm import LLM

    pair, draw = pair_folder(args.pair), random.Random(0)
    prompts = [row["prompt"] for row in load_prompts(TINY / "prompts.jsonl", 30)]

    def request() -> Request:
        return Request("", draw.choice(prompts), draw.randint(*args.tokens))

    drafter = pair / (args.drafter or "drafter")
    engine = UserEngine(
        {"method": "bastion", "model": str(drafter)},
        target=pair / "target",
        max_num_seqs=args.concurrency,
        max_model_len=1024,
        dtype=pair_dtype(args.pair),
    )
    turns = Turns(LLM(**engine.arguments()), request, args.concurrency)
    turns.run((NEVER, ADAPTIVE, DRAFTS), args.seconds)
    print(turns.table(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
