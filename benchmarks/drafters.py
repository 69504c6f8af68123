# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward of the tiny pair's other drafters: a chain and our trees.

The chain is vLLM's own, or for Domino, which vLLM does not have, a tree of width 1.

    python -m benchmarks.drafters                 # results/drafters.json, results/drafters.md
    python -m benchmarks.drafters --only dspark   # one of them again; the others' rows stay

Counted as in `benchmarks.tau`, whose rows for the pair's own drafter begin the table. The tokens of
every tree are compared with plain decoding's for all prompts at T=0. Those of 63 nodes are also
compared for a third of the prompts at T=0.8, where prompt number i has seed i.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import RESULTS, TINY
from benchmarks.costs import write_costs
from benchmarks.harness.decoder import Run, run_engine
from benchmarks.harness.engine import GAMMA, ROWS, Engine, Request, bastion, dflash
from benchmarks.progress import Progress
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from benchmarks.replay.costs import paper_a100
from benchmarks.tau import summary
from vllm_bastion.drafter_kinds import architectures_of, kind_of

DRAFTERS = ("dflash2", "dspark", "domino", "causal")
BUDGETS = (16, 32, 63)
ADAPTIVE = "adaptive (paper's A100)"
SEEDED = 63  # nodes of the trees at T=0.8
TEMPERATURE = 0.8


def configurations(drafter: Path, costs: str) -> dict[str, dict[str, Any]]:
    """Speculative configurations by the names of their rows."""
    config = SimpleNamespace(**json.loads((drafter / "config.json").read_text()))
    kind = kind_of(architectures_of(config))
    assert kind is not None
    chain = dflash(drafter, GAMMA, kind.method)
    if kind.model is not None:  # vLLM does not have it
        chain = bastion(drafter, GAMMA, GAMMA, top_k=1)
    rows = {"chain": chain}
    rows |= {f"N = {n}": bastion(drafter, n, n) for n in BUDGETS}
    adaptive = {"calibration": costs, "latency_model": "table"}
    return rows | {ADAPTIVE: bastion(drafter, max(BUDGETS), "adaptive", **adaptive)}


def run(name: str, speculative: dict[str, Any] | None, requests: list[Request]) -> Run:
    """Decode with one engine."""
    progress = Progress(name)
    done = run_engine(Engine(speculative), requests, progress)
    progress.done(f"{progress.seconds:.0f} s")
    return done


def own_drafter_rows() -> dict[str, Any]:
    """The rows of the pair's own drafter, from the result of `benchmarks.tau`."""
    names = {"chain": "dflash chain", ADAPTIVE: f"bastion, {ADAPTIVE}"}
    rows = json.loads((RESULTS / "tau.json").read_text())["results"]
    wanted = ("chain", *(f"N = {n}" for n in BUDGETS), ADAPTIVE)
    return {row: rows[names.get(row, f"bastion, {row}")] for row in wanted}


def markdown(results: dict[str, Any], command: str) -> str:
    """The table."""
    lines = [
        "| drafter | tau at T=0 | code | arithmetic | chat | mean | over its chain "
        f"| nodes verified | forwards | same tokens as plain | and at T={TEMPERATURE:g} |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for drafter, rows in {"drafter": own_drafter_rows(), **results}.items():
        for name, row in rows.items():
            total = row["all"]
            mean = total["tau_mean_of_domains"]
            cells = [f"{row[d]['tau']:.2f}" for d in DOMAINS]
            cells += [f"{mean:.2f}", f"{mean / rows['chain']['all']['tau_mean_of_domains']:.2f}"]
            cells += [f"{total['verified_per_forward']:.1f}", str(total["forwards"])]
            cells += [f"{total['identical_to_plain']}/{total['prompts']}", row.get("seeded", "")]
            lines.append(f"| {drafter} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{command}`", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=DRAFTERS, help="folders of benchmarks/tiny")
    parser.add_argument("--prompts", type=int, default=30, help="per domain (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    prompts = load_prompts(TINY / "prompts.jsonl", given.prompts)
    domain_of = {row["id"]: row["domain"] for row in prompts}
    greedy = [Request(row["id"], row["prompt"]) for row in prompts]
    seeded = [
        Request(row["id"], row["prompt"], temperature=TEMPERATURE, seed=i)
        for i, row in enumerate(prompts)
        if i % 3 == 0
    ]
    path = given.out / "drafters.json"
    report = json.loads(path.read_text()) if path.exists() else {"results": {}, "provenance": {}}
    source = provenance()
    plain, plain_seeded = run("plain", None, greedy), run("plain, seeded", None, seeded)
    with tempfile.TemporaryDirectory() as folder:
        costs = write_costs(paper_a100(ROWS), Path(folder) / "costs.json")
        for drafter in given.only:
            rows: dict[str, Any] = {}
            for name, speculative in configurations(TINY / drafter, costs).items():
                done = run(f"{drafter}, {name}", speculative, greedy)
                rows[name] = summary(done, plain, domain_of)
                if name == f"N = {SEEDED}":
                    done = run(f"{drafter}, {name}, seeded", speculative, seeded)
                    pairs = zip(done.completions, plain_seeded.completions, strict=True)
                    same = sum(a.token_ids == b.token_ids for a, b in pairs)
                    rows[name]["seeded"] = f"{same}/{len(seeded)}"
            report["results"][drafter] = rows
            report["provenance"][drafter] = source
            given.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    order = {name: report["results"][name] for name in DRAFTERS if name in report["results"]}
    table = markdown(order, "python -m benchmarks.drafters")
    (given.out / "drafters.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
