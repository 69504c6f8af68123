# SPDX-License-Identifier: Apache-2.0
"""What recording costs: an engine with metrics, log line and warnings on, against one without.

    python -m benchmarks.telemetry [--pair FOLDER] [--dtype bfloat16] [--rounds 5] [--tokens 64]

Engines with and without are started in turns, and each decodes the same prompts. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import TINY
from benchmarks.harness.decoder import Decoder, Run, count
from benchmarks.harness.engine import Engine, Request, bastion
from benchmarks.harness.process import EngineProcess
from benchmarks.prompts import load_prompts


@dataclass(frozen=True)
class Recorded(Engine):
    """An engine with or without vLLM's statistics and ours."""

    records: bool = True

    def variables(self) -> dict[str, str]:
        """Environment variables to add to the user's."""
        return {**super().variables(), "VLLM_BASTION_TELEMETRY": str(int(self.records))}

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`; its own statistics are on in both engines."""
        return {**super().arguments(), "disable_log_stats": False}


def _run(engine: Recorded, requests: list[Request]) -> Run:
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        process = EngineProcess(Path(folder) / "engine.log", engine.variables())
        try:
            process.start(Decoder, engine)
            process.answer()
            process.call("decode", requests)
            return process.answer()  # type: ignore[no-any-return]
        finally:
            process.close()


def main() -> int:
    """Print milliseconds per token of every round, and the median overhead."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pair", type=Path, default=TINY, help="folder with target and drafter")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--per-domain", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1, help="requests decoded at a time")
    parser.add_argument("--nodes", type=int, default=63)
    parser.add_argument("--budget", default="adaptive", help="or a number: then steps are the same")
    args = parser.parse_args()
    prompts = load_prompts(TINY / "prompts.jsonl", args.per_domain)
    requests = [Request(row["id"], row["prompt"], args.tokens) for row in prompts]
    budget = args.budget if args.budget == "adaptive" else int(args.budget)
    speculative = bastion(args.pair / "drafter", args.nodes, budget)
    per_token: dict[bool, list[float]] = {True: [], False: []}
    for number in range(args.rounds):
        for records in (True, False) if number % 2 else (False, True):
            engine = Recorded(
                speculative,
                target=args.pair / "target",
                max_num_seqs=args.requests,
                dtype=args.dtype,
                timed=True,
                records=records,
            )
            run = _run(engine, requests)
            per_token[records].append(1e3 * run.decode_s / count(run.completions).tokens)
            state = "on " if records else "off"
            print(
                f"round {number + 1}, {state}: {per_token[records][-1]:.3f} ms a token", flush=True
            )
    on, off = median(per_token[True]), median(per_token[False])
    print(f"median: on {on:.3f} ms, off {off:.3f} ms a token: {100 * (on / off - 1):+.2f}%")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
