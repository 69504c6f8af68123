# SPDX-License-Identifier: Apache-2.0
"""Load a server with trees for some minutes, repeat its requests on a plain one, and compare."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from tests.soak.client import Answer, Choice, send
from tests.soak.judge import Judge
from tests.soak.requests import MAX_MODEL_LEN, Request, Requests
from tests.soak.server import Server, serving, users_environment, values

OUTSTANDING = 9  # requests at the server at any time; six of them run
NODES = 63
# Rounding, as a difference of two logits.
_BOUND = {"float32": 1e-4, "bfloat16": 0.25}
_LOGPROB = {"float32": 1e-3, "bfloat16": 0.5}
_REPORT_S = 30
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Plain decoding then has the same seeded draws as trees.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_COUNTERS = (
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "bastion_steps_total",
)
_LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

Pair = tuple[Request, Answer]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak. Returns the summary."""
    config = json.loads((options.pair / "target" / "config.json").read_text())
    hybrid = "linear_num_key_heads" in config
    dtype = "bfloat16" if hybrid else "float32"
    rows = load_prompts((options.pair.parent if hybrid else options.pair) / "prompts.jsonl")
    assert {row["domain"] for row in rows} == set(DOMAINS)
    target = str(options.pair / "target")
    prompts = [row["prompt"] for row in rows]
    requests = Requests(target, prompts, options.seed, options.copying)
    speculative = {"method": "bastion", "model": str(options.pair / "drafter"),
                   "num_speculative_tokens": NODES}  # fmt: skip
    common = [
        target, "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "6",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    if not hybrid:  # for a hybrid, vLLM makes blocks as large as a state
        common += ["--num-gpu-blocks-override", "10", "--block-size", "128"]
    folder = Path(tempfile.mkdtemp(prefix="bastion-soak-"))
    trees, seen = _phase(
        "trees", [*common, "--speculative-config", json.dumps(speculative)], folder,
        lambda: _for_minutes(requests, options.minutes),
    )  # fmt: skip
    again = [request for request, _ in seen if request.repeatable or request.kind == "wrong"]
    plain, repeated = _phase("plain", common, folder, lambda: iter(again), again=True)
    expected = {request.number: answer for request, answer in repeated}
    judge = Judge(options.pair / "target", _BOUND[dtype])
    problems, near_ties, counts = compare(seen, expected, judge, _LOGPROB[dtype])
    return {
        "what": "random HTTP requests to vllm serve with trees, repeated on a plain server",
        **provenance(),
        "pair": options.pair.name,
        "dtype": dtype,
        "minutes": options.minutes,
        "seed": options.seed,
        **counts,
        "near_ties": near_ties,
        "problems": problems,
        "trees": trees,
        "plain": plain,
    }


def _for_minutes(requests: Requests, minutes: float) -> Iterator[Request]:
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        yield requests.draw()


def _phase(
    name: str, arguments: list[str], folder: Path, supply: Callable[[], Iterator[Request]],
    again: bool = False,
) -> tuple[dict[str, Any], list[Pair]]:  # fmt: skip
    """Serve all requests of one server. Returns what is known of it, and the answers.

    With `again`, a request that timed out is sent once more.
    """
    log = folder / f"{name}.log"
    with serving(arguments, users_environment(_ENVIRONMENT), log) as server:
        print(f"{name}: started in {server.start_s:.0f} s", file=sys.stderr, flush=True)
        memory = [_resident_mib(server.group)]
        begin = time.monotonic()
        answers = list(_load(server.port, supply(), name))
        if again:
            answers = repeat_timeouts(answers, lambda request: send(server.port, request))
        elapsed = time.monotonic() - begin
        _settle(server)
        memory.append(_resident_mib(server.group))
        metrics = server.metrics()
        known: dict[str, Any] = {
            "healthy": server.healthy(),
            "minutes": round(elapsed / 60, 2),
            "start_s": round(server.start_s),
            "resident_mib": memory,
            "left": {key: values(metrics, key) for key in _LEFT},
            "counters": {key: values(metrics, key) for key in _COUNTERS},
        }
    # The API server logs some of its own, as for a tool call that is no JSON.
    engine = (line for line in log.read_text(errors="replace").splitlines() if "(API" not in line)
    known["tracebacks"] = sum("Traceback (most recent" in line for line in engine)
    return known, answers


def _load(port: int, requests: Iterator[Request], name: str) -> Iterator[Pair]:
    """Send requests, `OUTSTANDING` at a time."""
    lock, reported = threading.Lock(), time.monotonic()

    def work() -> list[Pair]:
        nonlocal reported
        done: list[Pair] = []
        while True:
            with lock:
                request = next(requests, None)
            if request is None:
                return done
            done.append((request, send(port, request)))
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                print(f"{name}: request {request.number}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(OUTSTANDING) as pool:
        for future in [pool.submit(work) for _ in range(OUTSTANDING)]:
            yield from future.result()


def repeat_timeouts(answers: list[Pair], resend: Callable[[Request], Answer]) -> list[Pair]:
    """Send what timed out once more, one at a time: the host may have been paused."""
    return [(r, resend(r) if answer.timed_out else answer) for r, answer in answers]


def _settle(server: Server) -> None:
    """Wait until aborted requests are gone, at most half a minute."""
    for _ in range(30):
        metrics = server.metrics()
        if not any(values(metrics, key) for key in _LEFT):
            return
        time.sleep(1)


def _resident_mib(group: int) -> int:
    """Resident memory of a process group, MiB."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                pages += int((stat.parent / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended
    return pages * 4096 // 2**20


def compare(
    seen: Iterable[Pair], expected: dict[int, Answer], judge: Judge, logprob: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Counter[str]]:
    """Compare every answer with plain decoding's, if that came in time.

    Returns the problems, the near-ties and the counts of what was sent and compared.
    """
    problems: list[dict[str, Any]] = []
    near_ties: list[dict[str, Any]] = []
    counts = Counter({"compared": 0, "not_compared": 0})
    for request, answer in sorted(seen, key=lambda pair: pair[0].number):
        counts["requests"] += 1
        counts[request.kind] += 1
        counts["streamed"] += bool(request.given.get("stream"))
        counts["chat"] += "messages" in request.given
        counts["cut"] += answer.cut
        counts["tokens"] += sum(len(choice.tokens) for choice in answer.choices.values())
        told = {"number": request.number, "path": request.path, "body": request.shown}
        plain = expected.get(request.number)
        if plain is not None and plain.timed_out:
            # It says nothing about the server with trees.
            counts["not_compared"] += 1
            plain = None
        problem = answer.problem or _wrong_status(request, answer, plain)
        if problem:
            problems.append({**told, "problem": problem, "message": answer.message})
        elif plain is not None and answer.status == 200:
            counts["compared"] += 1
            for index, choice in sorted(answer.choices.items()):
                left = plain.choices.get(index, Choice())
                counts["compared_tokens"] += len(choice.tokens)
                found = _difference(request, index, left, choice, plain, judge, logprob)
                if found is not None:
                    (near_ties if found.pop("near_tie") else problems).append({**told, **found})
            if answer.choices.keys() != plain.choices.keys():
                problems.append({**told, "problem": "another number of choices"})
    return problems, near_ties, counts


def _wrong_status(request: Request, answer: Answer, plain: Answer | None) -> str | None:
    if answer.cut:
        return None
    if request.kind == "ours":
        return None if answer.status == 400 else f"status {answer.status} instead of 400"
    if plain is not None and plain.problem:
        return f"plain decoding: {plain.problem}"
    if plain is not None and answer.status != plain.status:
        return f"status {answer.status}, plain {plain.status} ({plain.message})"
    failed = answer.status >= 500 or not answer.status
    if plain is None and (failed or (request.kind == "right" and answer.status != 200)):
        return f"status {answer.status}"
    return None


def _difference(
    request: Request, index: int, plain: Choice, choice: Choice, answer: Answer, judge: Judge,
    logprob: float,
) -> dict[str, Any] | None:  # fmt: skip
    """What differs between two completions; `near_tie` says whether that is rounding."""
    pairs = enumerate(zip(plain.tokens, choice.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is not None:
        one, other = plain.tokens[at], choice.tokens[at]
        prompt = answer.prompts[index]
        tied = judge.near_tie(prompt, plain.tokens[:at], one, other, index, request.given)
        return {"near_tie": tied, "problem": f"choice {index}, token {at}: {one} became {other}"}
    for key in ("tokens", "text", "finish", "stop"):
        if getattr(plain, key) != getattr(choice, key):
            if key == "text" and _is_cut_call(request, plain, choice):
                continue
            text = f"{key} {getattr(plain, key)!r} became {getattr(choice, key)!r}"
            return {"near_tie": False, "problem": f"choice {index}: {text}"}
    if len(plain.logprobs) != len(choice.logprobs):
        counts = f"{len(plain.logprobs)} log-probabilities became {len(choice.logprobs)}"
        return {"near_tie": False, "problem": f"choice {index}: {counts}"}
    off = max((abs(a - b) for a, b in zip(plain.logprobs, choice.logprobs)), default=0.0)
    if off > logprob:
        return {"near_tie": False, "problem": f"choice {index}: log-probability off by {off:.2g}"}
    return None


def _is_cut_call(request: Request, plain: Choice, choice: Choice) -> bool:
    """Whether both are a streamed tool call without arguments, which `max_tokens` has cut off.

    Its text is "" or "{}": vLLM's parsers read what each step emits, see docs/troubleshooting.md.
    """
    given = request.given
    if not (given.get("stream") and given.get("tools")):
        return False
    return len(plain.tokens) == given["max_tokens"] and {plain.text, choice.text} == {"", "{}"}


def passed(summary: dict[str, Any]) -> bool:
    """Whether nothing went wrong, and there were trees and cut connections."""
    return (
        not summary["problems"]
        and summary["compared"] > summary["not_compared"]
        and summary["cut"] > 0
        and summary["trees"]["counters"]["spec_decode_num_drafts_total"] > 0
        and all(
            phase["healthy"] and not phase["tracebacks"] and not any(phase["left"].values())
            for phase in (summary["trees"], summary["plain"])
        )
    )
