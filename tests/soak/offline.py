# SPDX-License-Identifier: Apache-2.0
"""Random requests to one engine, every T=0 one checked.

An engine with method "bastion" and a KV cache too small for its requests decodes prompts of random
length with random sampling parameters. Some are aborted, some share prefixes, some have penalties,
grammars or logprobs. A second process decodes every finished T=0 request again with plain decoding
and compares. Nothing may fail, every KV block must be freed, and every token must be the same,
except for near-ties (see `tests.e2e.compare`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import GAMMA, bastion, sampling_params
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from tests.e2e.engines import ENVIRONMENT, Engine

OUTSTANDING = 7  # requests in the engine at any time; four of them run
NEAR_TIE = 1e-4
_REPORT_S = 30
_AT_ONCE = 8  # requests that are checked together
_GRAMMARS = (
    {"choice": ["one apple", "two pears", "none at all"]},
    {"regex": r"(ab|cd){2,12} [0-9]{2,6}"},
)


def engine_arguments(pair: Path, asynchronous: bool) -> dict[str, Any]:
    # Four requests at once, and blocks for about half of them.
    engine = Engine(max_model_len=288, num_blocks=20, async_scheduling=asynchronous, eager=True)
    return engine.of(model=str(pair / "target"), dtype="float32").arguments()


class Requests:
    def __init__(self, prompts: list[list[int]], seed: int) -> None:
        self._rng = random.Random(seed)
        self._prompts = prompts
        self._last: list[int] = prompts[0]
        self._count = 0

    def draw(self) -> dict[str, Any]:
        """The next request; one to be aborted has `abort_after` (tokens)."""
        rng = self._rng
        self._count += 1
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 110), "temperature": 0}
        if rng.random() < 0.3:
            params |= {"temperature": rng.choice((0.5, 0.8, 1.0)), "seed": rng.randrange(1 << 30)}
            params |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.95, "top_k": 40}))
        if rng.random() < 0.2:
            params |= rng.choice(
                (
                    {"repetition_penalty": 1.2},
                    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
                    {"min_tokens": rng.randint(0, params["max_tokens"])},
                    {"bad_words": ["the", "return"]},
                    {"logprobs": 2},
                    {"structured_outputs": rng.choice(_GRAMMARS)},
                )
            )
        if rng.random() < 0.2:
            params["stop"] = rng.choice((["\n\n"], ["."], ["="], ["return", "So"]))
        params["ignore_eos"] = rng.random() < 0.7
        request = {"id": f"soak{self._count}", "prompt": self._prompt(), "params": params}
        if rng.random() < 0.2:
            request["abort_after"] = rng.randint(1, 60)
        return request

    def _prompt(self) -> list[int]:
        """Part of a prompt, of several joined ones, or of the last one again for prefix hits."""
        rng = self._rng
        if rng.random() > 0.3:
            self._last = list(rng.choice(self._prompts))
            while rng.random() < 0.35:
                self._last += rng.choice(self._prompts)
            self._last = self._last[rng.choice((0, 0, rng.randrange(len(self._last)))) :]
        return self._last[: rng.randint(1, 240)]


class Soak:
    """Keeps an engine busy and returns the requests that finish."""

    def __init__(self, session: Any, requests: Requests) -> None:
        self._session, self._requests = session, requests
        self._running: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    def step(self, draw: bool) -> list[dict[str, Any]]:
        """One engine step; returns the requests that finished in it, with their tokens."""
        engine, finished = self._session.engine, []
        while draw and len(self._running) < OUTSTANDING:
            request = self._requests.draw()
            prompt = {"prompt_token_ids": request["prompt"]}
            engine.add_request(request["id"], prompt, sampling_params(request["params"]))
            self._running[request["id"]] = request
            self.counts["requests"] += 1
        for output in engine.step():
            request = self._running.get(output.request_id)
            if request is None:  # aborted while this step was running
                continue
            request["token_ids"] = list(output.outputs[0].token_ids)
            if output.finished:
                finished.append(request)
                self.counts["finished"] += 1
                self.counts["tokens"] += len(request["token_ids"])
                del self._running[output.request_id]
            elif len(request["token_ids"]) >= request.get("abort_after", 1 << 30):
                engine.abort_request([output.request_id])
                self.counts["aborted"] += 1
                del self._running[output.request_id]
        return finished

    @property
    def idle(self) -> bool:
        return not self._session.engine.has_unfinished_requests()


class Checker:
    """Plain decoding in a process of its own, which decodes finished requests again."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self._process = EngineProcess(log, ENVIRONMENT)
        self._process.start(PlainEngine, arguments)
        self._process.answer()
        self._pending: list[dict[str, Any]] = []
        self._busy = False
        self.counts: Counter[str] = Counter()
        self.mismatches: list[dict[str, Any]] = []

    def add(self, request: dict[str, Any]) -> None:
        self._pending.append(request)
        self._work(wait=False)

    def finish(self) -> None:
        while self._pending or self._busy:
            self._work(wait=True)
        self._process.close()

    def _work(self, wait: bool) -> None:
        if self._busy and (wait or self._process.has_answer()):
            counts, mismatches = self._process.answer()
            self.counts.update(counts)
            self.mismatches += mismatches
            self._busy = False
        if self._pending and not self._busy:
            self._process.call("check", self._pending[:_AT_ONCE])
            del self._pending[:_AT_ONCE]
            self._busy = True


class PlainEngine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from tests.e2e.session import Session

        self._session = Session({"engine": arguments})

    def check(self, requests: list[dict[str, Any]]) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Decode `requests` again. Returns counts, and the requests whose tokens differ."""
        batch = [{key: r[key] for key in ("id", "prompt", "params")} for r in requests]
        done = self._session.run({"requests": batch})["requests"]
        tokens = sum(len(request["token_ids"]) for request in requests)
        mismatches = [
            self._mismatch(request, done[request["id"]]["token_ids"])
            for request in requests
            if request["token_ids"] != done[request["id"]]["token_ids"]
        ]
        return {"checked": len(requests), "checked_tokens": tokens}, mismatches

    def _mismatch(self, request: dict[str, Any], plain: list[int]) -> dict[str, Any]:
        """Where two outputs differ first, and by how much the target's best two tokens differ."""
        ours = request["token_ids"]
        pairs = enumerate(zip(ours, plain, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(plain)))
        gap = float("inf")
        if at < min(len(ours), len(plain)):
            probe = {"id": f"{request['id']}gap", "prompt": request["prompt"] + plain[:at],
                     "params": {"temperature": 0, "max_tokens": 1, "logprobs": 2}}  # fmt: skip
            answer = self._session.run({"requests": [probe]})["requests"][probe["id"]]
            best = sorted(answer["logprobs"][0].values())
            gap = best[-1] - best[-2]
        return {**request, "plain": plain, "at": at, "gap": gap, "near_tie": gap < NEAR_TIE}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak. Returns the summary; its `error` is None if no engine failed."""
    from tests.e2e.session import Session

    os.environ.update(ENVIRONMENT)
    arguments = engine_arguments(options.pair, options.scheduling == "async")
    checker = Checker(arguments, Path(tempfile.mkdtemp(prefix="bastion-soak-")) / "plain.log")
    speculative = bastion(options.pair / "drafter", 16, "adaptive")
    session = Session({"engine": {**arguments, "speculative_config": speculative}})
    tokenizer = session.llm.get_tokenizer()
    rows = load_prompts(options.pair / "prompts.jsonl")
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    assert {row["domain"] for row in rows} == set(DOMAINS)
    soak = Soak(session, Requests(prompts, options.seed))
    free, memory = session.free_blocks(), [resident_mib()]
    error = None
    begin = reported = time.monotonic()
    end = begin + 60 * options.minutes
    try:
        while time.monotonic() < end or not soak.idle:
            for request in soak.step(draw=time.monotonic() < end):
                if request["params"]["temperature"] == 0:
                    checker.add(request)
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                memory.append(resident_mib())
                left = max(0.0, end - reported) / 60
                print(f"{left:.1f} min left, {dict(soak.counts)}", file=sys.stderr, flush=True)
        session.drain()
    except Exception as failure:  # the summary is the point of a soak that fails
        error = f"{type(failure).__name__}: {failure}"
    elapsed = time.monotonic() - begin
    print("waiting for plain decoding to catch up", file=sys.stderr, flush=True)
    try:
        checker.finish()
    except EngineError as failure:
        error = error or str(failure)
    session.read_steps()
    paths = [path for *_, path in session.trees]
    depths = [len(path) - 1 for path in paths]
    return {
        "what": "random requests against method bastion; T=0 ones decoded again plainly",
        **provenance(),
        "minutes": round(elapsed / 60, 2),
        "seed": options.seed,
        "scheduler": type(session.scheduler).__name__,
        "gamma": GAMMA,
        **soak.counts,
        **checker.counts,
        "mismatches": checker.mismatches,
        "preemptions": session.metrics()["num_preemptions"],
        "prefix_cache_hits": session.metrics()["prefix_cache_hits"],
        "trees": len(depths),
        "accepted_tokens": sum(depths),
        "paths_off_the_first_rows": sum(p != list(range(len(p))) for p in paths),
        "blocks": [free, session.free_blocks()],
        "resident_mib": [round(memory[0]), round(memory[len(memory) // 2]), round(resident_mib())],
        "error": error,
    }


def passed(summary: dict[str, Any]) -> bool:
    """Whether nothing went wrong, and preemptions and aborts did happen."""
    return (
        summary["error"] is None
        and all(mismatch["near_tie"] for mismatch in summary["mismatches"])
        and summary["blocks"][0] == summary["blocks"][1]
        and summary["preemptions"] > 0
        and summary["aborted"] > 0
    )
