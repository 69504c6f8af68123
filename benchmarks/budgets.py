# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget against fixed ones and no drafts, in one engine, in turns.

    python -m benchmarks.budgets [--pair 0.6B] [--drafter dflash2] [--concurrency 1 4]
                                 [--temperature 1] [--mixed] [--out FOLDER]

Rows:

    plain       vLLM without speculation, with the model runner that it chooses: a second engine
    never       this engine, which never drafts: what a plain step costs here
    N = 16      trees of 16 nodes in every step
    adaptive    as a user has it

All but the first are one engine that is switched between requests, in the order of the rows and
then in the reverse one. So they share memory, threads and the machine's moods, which differ between
two starts of one engine by more than two good budgets do. Costs are learned in all of them. A block
decodes all prompts of a domain, or with `--mixed` one queue of all domains, `--concurrency` at a
time; its time includes their prefill. Use several times as many prompts as run at a time: once the
queue is empty, the batch shrinks. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS, TINY
from benchmarks.harness.decoder import engine_core, model_runner, reported_nodes
from benchmarks.harness.engine import GAMMA, Engine, Request, UserEngine
from benchmarks.harness.process import EngineProcess, report_state
from benchmarks.paper.arguments import pair_drafter, pair_dtype, pair_folder, without_folders
from benchmarks.paper.methods import Target, gpu_share
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from vllm_bastion.policy.step_size import StepSize

PLAIN, NEVER, ADAPTIVE = "plain", "never", "adaptive"


@dataclass
class Block:
    """All prompts of a domain, decoded in one way. `nodes` counts those verified."""

    mode: str
    domain: str
    concurrency: int
    seconds: float
    steps: int
    nodes: int
    # Steps of single requests after their prompts, and the tokens that these emitted: tau is the
    # ratio of the two.
    forwards: int = 0
    emitted: int = 0
    # Replies that equal plain decoding's; None without plain decoding.
    equal: int | None = None
    # Steps that the worker timed: [requests, rows, 1 if verified, number, median ms, profile's ms].
    timed: list[list[float]] = field(default_factory=list)


class Switched:
    """Engines in this process, of which one has a budget that is switched between requests.

    Args:
        engine: the one with method "bastion" and an adaptive budget.
        requests: by domain.
        others: further engines by mode; default: plain decoding.
    """

    def __init__(
        self,
        engine: Engine,
        requests: dict[str, list[Request]],
        others: dict[str, Engine] | None = None,
    ) -> None:
        from vllm import LLM

        if others is None:
            others = {PLAIN: replace(engine, speculative=None)}
        self.start_s: dict[str, float] = {}
        self._engines: dict[str, Any] = {}
        for mode, one in {**others, ADAPTIVE: engine}.items():
            report_state(f"starting {mode}")
            begin = time.perf_counter()
            llm = LLM(**one.arguments())
            self._engines[mode] = llm.llm_engine
            self.start_s[mode] = time.perf_counter() - begin
            self._count_steps(engine_core(llm).scheduler)
        self._requests, self._sent, self._mode = requests, 0, ADAPTIVE
        self._plain: dict[str, list[list[int]]] = {}
        self._forget()
        self.core, self.runner = engine_core(llm), model_runner(llm)
        manager = self.runner.adaptive_verification
        self._switch_budget(manager)
        self._switch_drafting(manager.runtime.controller)
        self._watch_times(manager.runtime)

    def _forget(self) -> None:
        self._steps = self._nodes = self._forwards = self._emitted = 0
        self._prompts: set[str] = set()
        self._timed: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}

    def _count_steps(self, scheduler: Any) -> None:
        update = scheduler.update_from_output

        def update_from_output(scheduled: Any, output: Any) -> Any:
            self._steps += 1
            self._count_tokens(scheduled, output)
            return update(scheduled, output)

        scheduler.update_from_output = update_from_output

    def _count_tokens(self, scheduled: Any, output: Any) -> None:
        verified = reported_nodes(output)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
            if not len(tokens):
                continue  # part of a prompt
            if name not in self._prompts:
                self._prompts.add(name)
                continue
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            self._nodes += drafts if verified is None else verified.get(name, 0)
            self._forwards += 1
            self._emitted += len(tokens)

    def _watch_times(self, runtime: Any) -> None:
        """Sort what the worker times by requests and rows, beside what the profile says."""
        timer, table = runtime.timer, runtime.controller.latency.table
        completed = timer.completed

        def watched() -> Iterator[Any]:
            for step in completed():
                if step.total_ms is not None:
                    reqs, context = step.num_reqs, step.context_len
                    rows = min(step.rows, table.max_rows)
                    profile = (
                        float(table.cost_ms(reqs, context)[rows])
                        if step.drafted
                        else table.plain_ms(reqs, context)
                    )
                    key = reqs, int(table.padded_rows[rows]), step.verified
                    self._timed.setdefault(key, []).append((step.total_ms, profile))
                yield step

        timer.completed = watched

    def _switch_budget(self, manager: Any) -> None:
        choose, observe = manager._choose, manager._observe

        def chosen(slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
            if self._mode in (ADAPTIVE, NEVER):
                return choose(slots, drafts)
            if manager.lag:  # the device keeps their sum only, and shares it out
                controller, learned = manager.runtime.controller, manager.runtime.controller.size
                controller.size = StepSize()
                controller.size.observe(int(self._mode) * len(slots), len(slots), len(slots))
                number = choose(slots, drafts)
                controller.size = learned
                return number
            choose(slots, drafts)  # its time is part of a step
            limit = manager._max_step_nodes(len(slots)) // len(slots)
            return np.minimum(manager._max_nodes(drafts), min(int(self._mode), limit)).astype(
                np.int32
            )

        def observed(published: Any) -> None:
            if self._mode == ADAPTIVE:
                observe(published)

        manager._choose, manager._observe = chosen, observed

    def _switch_drafting(self, controller: Any) -> None:
        plan = controller.plan

        def planned(batch: Any) -> Any:
            decision = plan(batch)
            if self._mode == ADAPTIVE or decision.replies_end:
                return decision
            return replace(decision, drafts=self._mode != NEVER)

        controller.plan = planned

    def block(self, mode: str, domain: str, concurrency: int) -> Block:
        """Decode a domain's prompts."""
        self._mode = mode
        engine = self._engines.get(mode, self._engines[ADAPTIVE])
        self._forget()
        waiting, replies = list(self._requests[domain]), dict[str, list[int]]()
        names = []
        begin = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < concurrency:
                request, self._sent = waiting.pop(0), self._sent + 1
                params = request.sampling_params()
                names.append(str(self._sent))
                engine.add_request(names[-1], request.vllm_prompt(), params)
            for output in engine.step():
                replies[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - begin
        found = [replies[name] for name in names]
        if mode == PLAIN:
            self._plain.setdefault(domain, found)
        plain = self._plain.get(domain)
        equal = None if plain is None else sum(a == b for a, b in zip(found, plain, strict=True))
        return Block(
            *(mode, domain, concurrency, seconds, self._steps, self._nodes, self._forwards),
            *(self._emitted, equal, _medians(self._timed)),
        )

    def measure(self, modes: Sequence[str], concurrency: Sequence[int], rounds: int) -> list[Block]:
        """`rounds` times all modes, back and forth, after one round that is not timed."""
        blocks = []
        for at_once in concurrency:
            for mode in modes:  # touch memory and load code
                self.block(mode, next(iter(self._requests)), at_once)
            for number in range(rounds):
                for domain in self._requests:
                    report_state(f"{at_once} at a time, round {number + 1} of {rounds}, {domain}")
                    for mode in modes if number % 2 == 0 else modes[::-1]:
                        blocks.append(self.block(mode, domain, at_once))
        return blocks


def _medians(
    timed: dict[tuple[int, int, bool], list[tuple[float, float]]],
) -> list[list[float]]:
    return [
        [reqs, rows, int(verified), len(times), *(float(x) for x in np.median(times, axis=0))]
        for (reqs, rows, verified), times in sorted(timed.items())
    ]


def speedups(blocks: Sequence[Block], base: str) -> dict[tuple[int, str], dict[str, float]]:
    """(concurrency, mode) -> domain or "mean" -> the median over the rounds of base's time / its.

    "mean" is of a round's total times.
    """
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for block in blocks:
        entry = found.setdefault((block.concurrency, block.mode), {})
        entry.setdefault(block.domain, []).append(block.seconds)
    for entry in found.values():
        entry["mean"] = [sum(times) for times in zip(*entry.values(), strict=True)]
    return {
        (at_once, mode): {
            domain: median(np.array(found[at_once, base][domain]) / np.array(times))
            for domain, times in entry.items()
        }
        for (at_once, mode), entry in found.items()
    }


def tables(blocks: Sequence[Block]) -> str:
    """Markdown: speed-ups by concurrency and mode, and the adaptive budget over the best fixed."""
    lines = []
    gains = speedups(blocks, PLAIN)
    for at_once in dict.fromkeys(block.concurrency for block in blocks):
        rows = {mode: gain for (number, mode), gain in gains.items() if number == at_once}
        domains = list(next(iter(rows.values())))
        lines += [f"## {at_once} at a time", ""]
        lines += [f"| | {' | '.join(domains)} | N | ms a step |", "|---" * (len(domains) + 3) + "|"]
        for mode, gain in rows.items():
            own = [b for b in blocks if (b.mode, b.concurrency) == (mode, at_once)]
            cells = [f"{gain[domain]:.2f}x" for domain in domains]
            if mode == PLAIN:
                cells += ["", ""]
            else:
                steps = sum(b.steps for b in own)
                cells.append(f"{sum(b.nodes for b in own) / steps:.1f}")
                cells.append(f"{1e3 * sum(b.seconds for b in own) / steps:.1f}")
            name = f"N = {mode}" if mode.isdigit() else mode
            lines.append(f"| {name} | {' | '.join(cells)} |")
        fixed = {mode: gain["mean"] for mode, gain in rows.items() if mode.isdigit()}
        if fixed and ADAPTIVE in rows:
            best = max(fixed, key=lambda mode: fixed[mode])
            ratio = speedups([b for b in blocks if b.concurrency == at_once], best)
            value = ratio[at_once, ADAPTIVE]["mean"]
            lines += ["", f"Adaptive over N = {best}, the best fixed budget: {value:.3f}"]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Print a table for each number of requests at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="tiny", help="tiny, or a shape of benchmarks.widen")
    parser.add_argument("--drafter", help="a further drafter of the pair")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=4, help="of a domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mixed", action="store_true", help="one queue of all domains")
    parser.add_argument("--out", type=Path, default=RESULTS / "budgets")
    args = parser.parse_args()
    pair = pair_folder(args.pair)
    drafter = pair / "drafter"
    if args.drafter:
        drafter = Path(pair_drafter(args.pair, pair, args.drafter))
    at_once, length = max(args.concurrency), 1024
    what = Target(str(pair / "target"), str(drafter), GAMMA)
    memory = gpu_share(what, 2)(at_once, length) if torch.cuda.is_available() else {}
    engine = UserEngine(
        {"method": "bastion", "model": str(drafter)},
        target=pair / "target",
        max_num_seqs=at_once,
        max_model_len=length,
        dtype=pair_dtype(args.pair),
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        **memory,
    )
    requests: dict[str, list[Request]] = {domain: [] for domain in DOMAINS}
    for row in load_prompts(TINY / "prompts.jsonl", args.prompts):
        seed = None if args.temperature == 0 else 1
        requests[row["domain"]].append(
            Request(row["id"], row["prompt"], args.tokens, args.temperature, seed)
        )
    if args.mixed:
        turns = zip(*requests.values(), strict=True)
        requests = {"mixed": [request for turn in turns for request in turn]}
    modes = [PLAIN, NEVER, *map(str, args.budgets), ADAPTIVE]
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        process = EngineProcess(Path(folder) / "engine.log", engine.variables())
        try:
            process.start(Switched, engine, requests)
            process.answer()
            process.call("measure", modes, args.concurrency, args.rounds)
            blocks: list[Block] = process.answer()
        finally:
            process.close()
    page = tables(blocks)
    print(page)
    argv = without_folders(sys.argv[1:])
    found = {"provenance": provenance(argv), "blocks": [asdict(block) for block in blocks]}
    kinds = args.drafter, "mixed" if args.mixed else None, "t1" if args.temperature else None
    name = "-".join(filter(None, (args.pair, *kinds)))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    command = found["provenance"]["command"]
    (args.out / f"{name}.md").write_text(f"# {name}\n\n`{command}`\n\n{page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
