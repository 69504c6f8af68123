# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward (tau) of requests with penalties, log-probabilities or a grammar.

    python -m benchmarks.kinds                # results/kinds.json, results/kinds.md
    python -m benchmarks.kinds --prompts 2    # per domain and kind

Each kind of request is decoded by vLLM's dflash (a chain) and by method "bastion" (a tree of 63
nodes), at T=0 and one at a time. The token ids of both are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, TINY
from benchmarks.harness.decoder import count, run_engine
from benchmarks.harness.engine import Engine, Request, bastion, dflash
from benchmarks.progress import Progress
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance

NODES = 63
_JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"enum": [7, 44]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLAINEST = "nothing"
KINDS: dict[str, dict[str, Any]] = {
    PLAINEST: {},
    "presence 1.5": {"presence_penalty": 1.5},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "bad words": {"bad_words": ["the", "return", "="]},
    "logprobs 5": {"logprobs": 5},
    "min tokens": {"min_tokens": 32},
    "JSON": {"structured_outputs": {"json": _JSON}},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{40,80}\."}},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="per domain and kind (default 4)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    prompts = load_prompts(TINY / "prompts.jsonl", given.prompts)
    requests = [
        Request(f"{kind}/{row['domain']}/{row['id']}", row["prompt"], given.tokens, params=params)
        for kind, params in KINDS.items()
        for row in prompts
    ]
    done = {}
    for name, spec in (
        ("chain", dflash(TINY / "drafter")),
        ("tree", bastion(TINY / "drafter", NODES, NODES)),
    ):
        progress = Progress(name)
        done[name] = run_engine(Engine(spec), requests, progress)
        progress.done(f"{progress.seconds:.0f} s")
    source = provenance()
    head = "| T=0 | chain: code | arithmetic | chat | tree: code | arithmetic | chat | nodes |"
    lines = ["<!-- kinds:begin -->", f"{head} same tokens |", "|---" * 9 + "|"]
    rows: dict[str, Any] = {}
    for kind in KINDS:
        row: dict[str, Any] = {}
        for name, run in done.items():
            for domain in DOMAINS:
                own = [c for c in run.completions if c.name.startswith(f"{kind}/{domain}/")]
                row[f"{name} {domain}"] = round(count(own).tau, 3)
        trees = [c for c in done["tree"].completions if c.name.startswith(f"{kind}/")]
        chains = [c for c in done["chain"].completions if c.name.startswith(f"{kind}/")]
        same = sum(a.token_ids == b.token_ids for a, b in zip(chains, trees, strict=True))
        row |= {"nodes": round(count(trees).mean_verified, 1), "same": same, "of": len(trees)}
        rows[kind] = row
        taus = [f"{row[f'{name} {domain}']:.2f}" for name in done for domain in DOMAINS]
        cells = [*taus, f"{row['nodes']:.1f}", f"{same}/{len(trees)}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", f"`{source['command']}`", "<!-- kinds:end -->", ""]
    given.out.mkdir(parents=True, exist_ok=True)
    report = {"provenance": source, "prompts_per_domain": given.prompts, "results": rows}
    (given.out / "kinds.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / "kinds.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
