# SPDX-License-Identifier: Apache-2.0
"""What trials of trees cost where replies are short: the share of decode steps, and the speed.

    python -m benchmarks.trials [--workers 1 2] [--tokens 14] [--concurrency 8]

Plain decoding and method "bastion" as a user has it, in turns, an engine each, from one queue of
prompts. New requests arrive all the time, so the controller hardly knows any of them. A trial is a
step of the kind that does not seem to pay; the engine counts steps by reason. An engine that starts
tries both kinds, so the share falls with the length of a run: `--passes 1` shows the first steps.
Nothing else may run on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import TINY, parser_of
from benchmarks.harness.decoder import run_engine
from benchmarks.harness.engine import Request, UserEngine
from benchmarks.paper.arguments import pair_dtype, pair_folder
from benchmarks.prompts import load_prompts

_STEPS = "vllm:bastion_steps"


def steps_by_reason(llm: Any) -> Callable[[], dict[str, float]]:
    """Probe: the engine's decode steps by reason; empty without method "bastion"."""

    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            if metric.name == _STEPS:
                reason = metric.labels["reason"]
                found[reason] = found.get(reason, 0.0) + metric.value
        return found

    return read


def engine_of(pair: Path, name: str, workers: int, at_once: int, *, bastion: bool) -> UserEngine:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if workers > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return UserEngine(
        {"method": "bastion", "model": str(pair / "drafter")} if bastion else None,
        target=pair / "target",
        max_num_seqs=at_once,
        max_model_len=1024,
        dtype=pair_dtype(name),
        timed=True,
        probe="benchmarks.trials:steps_by_reason",
        environment=environment,
        more={"tensor_parallel_size": workers, "disable_log_stats": False},
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=14)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=24, help="of a domain")
    parser.add_argument("--passes", type=int, default=16, help="over the prompts, in an engine")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    pair = pair_folder(args.pair)
    requests = [
        Request(f"{row['id']}-{number}", row["prompt"], args.tokens)
        for number in range(args.passes)
        for row in load_prompts(TINY / "prompts.jsonl", args.prompts)
    ]
    print("| workers | decode steps | trials | share | tokens/s | plain tokens/s |")
    print("|---" * 6 + "|")
    for workers in args.workers:
        seconds, steps = {True: 0.0, False: 0.0}, dict[str, float]()
        for number in range(args.rounds):
            for bastion in (number % 2 == 0, number % 2 == 1):
                engine = engine_of(pair, args.pair, workers, args.concurrency, bastion=bastion)
                run = run_engine(engine, requests)
                seconds[bastion] += run.decode_s
                for reason, count in run.probed.items():
                    steps[reason] = steps.get(reason, 0.0) + count
        trials = sum(count for reason, count in steps.items() if reason.startswith("trial"))
        total, tokens = sum(steps.values()), args.rounds * len(requests) * args.tokens
        speeds = [f"{tokens / seconds[bastion]:.0f}" for bastion in (True, False)]
        share = f"{trials / total:.1%}" if total else "no steps"
        print(
            f"| {workers} | {total:.0f} | {trials:.0f} | {share} | {' | '.join(speeds)} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
