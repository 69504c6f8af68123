# SPDX-License-Identifier: Apache-2.0
"""Forwards, and tokens per forward, of 1 to 256 requests at once: bastion against plain decoding.

    python -m benchmarks.load                        # results/load.json, results/load.md
    python -m benchmarks.load --requests 1 4 16      # a quick run

All requests arrive together, T=0, and decode to `max_tokens`. A *forward* is one step of the
engine, prompts included, with all the requests that the scheduler put into it. Trees have up to 63
nodes, with budgets from given costs: with the paper's A100, drafting pays in every batch here; with
"never", no draft pays; "this CPU" is `results/cpu-profile.json`. The *time* is what all forwards
and drafts take by these costs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, TINY
from benchmarks.costs import write_costs
from benchmarks.harness.decoder import Run, model_runner, run_engine
from benchmarks.harness.engine import Engine, Request, bastion
from benchmarks.progress import Progress
from benchmarks.prompts import load_prompts
from benchmarks.provenance import provenance
from benchmarks.replay.costs import CostSource, from_profile, paper_a100
from vllm_bastion.policy.cost.table import StepCostTable

NODES = 63
TOKEN_LIMIT = 512
PLAIN = "plain"


def steps(llm: Any) -> Callable[[], list[list[float]]]:
    """Probe: the requests, rows, mean context length and draft (0 or 1) of every forward."""
    runner = model_runner(llm)
    sample, seen = runner.sample_tokens, []

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        output = sample(*args, **kwargs)
        if state is not None:
            batch, speculator = state.input_batch, getattr(runner, "speculator", None)
            drafted = speculator is not None and speculator.runtime.drafted
            context = float(batch.num_computed_tokens_np.mean())
            seen.append([batch.num_reqs, batch.num_tokens, context, float(drafted)])
        return output

    runner.sample_tokens = sample_tokens
    return lambda: seen


def time_ms(table: StepCostTable, done: Run) -> float:
    """What the forwards and drafts of a run take."""
    total = 0.0
    for num_reqs, rows, context, drafted in done.probed:
        forward = table.forward_ms(int(num_reqs), context)[min(int(rows), table.max_rows)]
        beyond = table.drafter_ms(int(num_reqs)) + table.aux_ms if drafted else table.plain_aux_ms
        total += float(forward) + beyond
    return total


def sources(limit: int, profile: Path) -> list[CostSource]:
    """Costs up to `limit` rows: trees pay; this CPU's; trees never pay."""
    never = StepCostTable.linear(0.001, 1.0, max_rows=limit, drafter_ms=10.0 * limit)
    return [
        paper_a100(limit),
        from_profile("this CPU", profile, limit),
        CostSource("never", never, None),
    ]


def summary(
    done: Run, reference: Run, table: StepCostTable | None = None
) -> dict[str, float | int]:
    """A row of the table."""
    requests = [step[0] for step in done.probed]
    tokens = sum(len(c.token_ids) for c in done.completions)
    pairs = zip(done.completions, reference.completions, strict=True)
    return {
        "forwards": len(done.probed),
        "tokens": tokens,
        "tokens_per_forward": round(tokens / len(done.probed), 2),
        "requests_per_forward": round(sum(requests) / len(requests), 2),
        "most_requests": int(max(requests)),
        "time_of_plain": 1.0
        if table is None
        else round(time_ms(table, done) / time_ms(table, reference), 3),
        "identical_to_plain": sum(a.token_ids == b.token_ids for a, b in pairs),
        "requests": len(done.completions),
    }


def markdown(results: dict[str, Any], settings: dict[str, Any], command: str) -> str:
    """The table."""
    lines = [
        "# Many requests at once",
        "",
        f"{settings['new_tokens']} new tokens a request, T=0, max_num_batched_tokens "
        f"{settings['token_limit']}, trees of up to {settings['nodes']} nodes.",
        "",
        "| requests | costs | forwards | of plain's | time of plain's | tokens per forward "
        "| requests per forward, mean and most | same tokens as plain |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for count, rows in results.items():
        for name, row in rows.items():
            of_plain = row["forwards"] / rows[PLAIN]["forwards"]
            lines.append(
                f"| {count} | {name} | {row['forwards']} | {of_plain:.2f} "
                f"| {row['time_of_plain']:.2f} "
                f"| {row['tokens_per_forward']:.2f} "
                f"| {row['requests_per_forward']:.1f}, {row['most_requests']} "
                f"| {row['identical_to_plain']}/{row['requests']} |"
            )
    return "\n".join([*lines, "", f"`{command}`", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=24, help="new tokens (default 24)")
    parser.add_argument("--limit", type=int, default=TOKEN_LIMIT, help="max_num_batched_tokens")
    parser.add_argument("--profile", type=Path, default=RESULTS / "cpu-profile.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    prompts = load_prompts(TINY / "prompts.jsonl")
    source = provenance()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        speculative: dict[str, Any] = {PLAIN: None}
        tables: dict[str, StepCostTable] = {}
        for costs in sources(given.limit, given.profile):
            path = write_costs(costs, Path(folder) / f"{len(speculative)}.json")
            tables[costs.name] = costs.table
            keys = {"calibration": path, "latency_model": "table"}
            speculative[costs.name] = bastion(TINY / "drafter", NODES, "adaptive", **keys)
        for count in given.requests:
            requests = [
                # Spread over the domains, and repeated after the last prompt.
                Request(str(i), prompts[i * 31 % len(prompts)]["prompt"], given.tokens)
                for i in range(count)
            ]
            rows = results[str(count)] = {}
            reference: Run | None = None
            for name, settings in speculative.items():
                engine = Engine(
                    settings,
                    max_num_seqs=count,
                    max_num_batched_tokens=given.limit,
                    probe="benchmarks.load:steps",
                )
                progress = Progress(f"{count} requests, {name}")
                done = run_engine(engine, requests, progress)
                reference = reference or done
                rows[name] = summary(done, reference, tables.get(name))
                progress.done(f"{rows[name]['forwards']} forwards in {progress.seconds:.0f} s")
    report_settings = {
        "new_tokens": given.tokens,
        "token_limit": given.limit,
        "nodes": NODES,
        "dtype": "float32",
    }
    report = {"provenance": source, "settings": report_settings, "results": results}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "load.json").write_text(json.dumps(report, indent=1) + "\n")
    table = markdown(results, report_settings, source["command"])
    (given.out / "load.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
