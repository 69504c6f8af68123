# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward (tau) of plain decoding, vLLM's dflash chain and bastion, per domain.

    python -m benchmarks.tau                      # T=0: results/tau.json, results/tau.md
    python -m benchmarks.tau --temperature 1      # results/tau-t1.json, results/tau-t1.md
    python -m benchmarks.tau --prompts 10         # a third of the prompts
    python -m benchmarks.tau --pair benchmarks/tiny/hybrid --dtype bfloat16   # results/tau-hybrid.*

Every configuration is a separate engine that decodes the held-out prompts one at a time, as in the
paper. tau of a domain = tokens emitted / target forwards over its prompts, as defined in
`benchmarks.harness.decoder`. At T=1, prompt number i has seed i.

"adaptive" chooses the budget of each step by cost. The best tree depends on the machine, so there
are two rows: one with the costs measured on this CPU (`results/cpu-profile.json`), one with the
costs that the paper prints for an A100.

In bfloat16 texts may differ where two tokens are equally good: see `benchmarks.near_ties`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, TINY
from benchmarks.costs import write_costs
from benchmarks.harness.decoder import Run, count, run_engine
from benchmarks.harness.engine import GAMMA, ROWS, Engine, Request, bastion, dflash
from benchmarks.near_ties import Judge
from benchmarks.progress import Progress
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from benchmarks.replay.costs import from_profile, paper_a100

BUDGETS = (8, 16, 32, 63)
NODES = max(BUDGETS)
PLAIN = "plain"
_SAMPLED = (
    "Requests have seeds. dflash keeps the target's distribution but not plain decoding's draws; "
    "bastion keeps both."
)


def configurations(pair: Path, dtype: str, profile: Path, folder: Path) -> dict[str, Engine]:
    """Engines by the names of their rows."""
    drafter = pair / "drafter"
    spec = {PLAIN: None, "dflash chain": dflash(drafter)}
    spec |= {f"bastion, N = {n}": bastion(drafter, n, n) for n in BUDGETS}
    for source in (paper_a100(ROWS), from_profile("this CPU", profile, ROWS)):
        costs = write_costs(source, folder / f"{len(spec)}.json")
        tree = bastion(drafter, NODES, "adaptive", calibration=costs, latency_model="table")
        spec[f"bastion, adaptive ({source.name})"] = tree
    return {
        name: Engine(speculative, pair / "target", dtype=dtype, prefix_caching=False)
        for name, speculative in spec.items()
    }


def summary(
    done: Run, reference: Run, domain_of: dict[str, str]
) -> dict[str, dict[str, float | int]]:
    """Counts per domain, and over all domains."""
    truth = {c.name: c.token_ids for c in reference.completions}
    out: dict[str, dict[str, float | int]] = {}
    for domain in (*DOMAINS, "all"):
        own = [c for c in done.completions if domain in (domain_of[c.name], "all")]
        total = count(own)
        out[domain] = {
            "prompts": len(own),
            "identical_to_plain": sum(c.token_ids == truth[c.name] for c in own),
            "tokens": total.tokens,
            "forwards": total.forwards,
            "tau": round(total.tau, 4),
            "verified_per_forward": round(total.mean_verified, 2),
        }
    out["all"]["tau_mean_of_domains"] = round(sum(out[d]["tau"] for d in DOMAINS) / 3, 4)
    return out


def near_ties(judge: Judge, texts: list[str], done: Run, reference: Run) -> int:
    """How many completions first differ from the reference at a near-tie."""
    count = 0
    for text, one, other in zip(texts, done.completions, reference.completions, strict=True):
        if one.token_ids != other.token_ids:
            count += judge.tied(text, one.token_ids, other.token_ids)
    return count


def markdown(results: dict[str, Any], temperature: float, command: str, marker: str) -> str:
    """The README's table, between markers."""
    lines = [
        f"<!-- {marker}:begin -->",
        f"| tau at T={temperature:g} | code | arithmetic | chat | mean | nodes verified "
        "| forwards | same tokens as plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        total = row["all"]
        taus = [row[domain]["tau"] for domain in DOMAINS]
        cells = [f"{tau:.2f}" for tau in (*taus, total["tau_mean_of_domains"])]
        cells += [f"{total['verified_per_forward']:.1f}", str(total["forwards"])]
        same = f"{total['identical_to_plain']}/{total['prompts']}"
        if total.get("near_ties"):
            same += f", {total['near_ties']} part at a near-tie"
        cells += [same]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if temperature:
        lines += ["", _SAMPLED]
    lines += ["", f"`{command}`", f"<!-- {marker}:end -->", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=30, help="per domain (default 30)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    parser.add_argument(
        "--only", nargs="*", default=[], help="rows whose name contains one of these"
    )
    parser.add_argument("--pair", type=Path, default=TINY, help="folder of target and drafter")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--data", type=Path, default=TINY / "prompts.jsonl")
    parser.add_argument("--profile", type=Path, default=RESULTS / "cpu-profile.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    if not given.profile.exists():
        parser.error(f"no {given.profile}: run 'python -m benchmarks.replay.record --profile'")
    stem = "tau" if given.pair == TINY else f"tau-{given.pair.name}"
    stem += "" if given.temperature == 0 else f"-t{given.temperature:g}"
    exact = given.dtype == "float32" or given.temperature
    judge = None if exact else Judge(given.pair / "target")
    prompts = load_prompts(given.data, given.prompts)
    requests = [
        Request(row["id"], row["prompt"], given.tokens, given.temperature, seed)
        for seed, row in enumerate(prompts)
    ]
    domain_of = {row["id"]: row["domain"] for row in prompts}
    texts = [row["prompt"] for row in prompts]
    source = provenance()
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    reference: Run | None = None
    with tempfile.TemporaryDirectory() as folder:
        engines = configurations(given.pair, given.dtype, given.profile, Path(folder))
        for name, engine in engines.items():
            if given.only and not any(part in name for part in (*given.only, PLAIN)):
                continue
            progress = Progress(name)
            done = run_engine(engine, requests, progress)
            reference = reference or done
            results[name] = summary(done, reference, domain_of)
            total = results[name]["all"]
            if judge is not None:
                total["near_ties"] = near_ties(judge, texts, done, reference)
                if done is reference:
                    plain = [c.token_ids for c in done.completions]
                    total["by_transformers"] = asdict(judge.agreement(texts, plain))
            seconds[name] = round(progress.seconds, 1)
            progress.done(f"tau {total['tau_mean_of_domains']:.2f} in {seconds[name]:.0f} s")
    given.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "temperature": given.temperature,
        "new_tokens": given.tokens,
        "prompts_per_domain": given.prompts,
        "batch": 1,
        "gamma": GAMMA,
        "nodes": NODES,
        "dtype": given.dtype,
    }
    report = {"provenance": source, "settings": settings, "results": results, "seconds": seconds}
    (given.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    table = markdown(results, given.temperature, source["command"], stem)
    (given.out / f"{stem}.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
