# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.compare`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import geometric_mean

import benchmarks.compare
from bastion_kernels.cpu.cache import root as cache_dir
from benchmarks import ROOT, TINY, parser_of
from benchmarks.e2e import main as e2e
from benchmarks.e2e.methods import PLAIN
from benchmarks.e2e.report import by_method, by_start, numbers
from benchmarks.e2e.store import Row
from benchmarks.pairs import REAL
from benchmarks.smollm2.states import FAST_DTYPE
from benchmarks.widen import pair_of

_SHORT = {"domain": "14 tokens", "params": {"max_tokens": 14}}


@dataclass(frozen=True)
class SetUp:
    """A pair and a drafter.

    Args:
        words: of the method, see `benchmarks.e2e.methods`.
        seconds: of each load; a large model needs more for as many rounds.
        short: also decode the prompts with short replies.
    """

    name: str
    pair: str
    loads: tuple[int, ...]
    words: str = "bastion"
    seconds: float = 20.0
    short: bool = False


SET_UPS = (
    SetUp("tiny", "tiny", (1, 8, 16), short=True),
    SetUp("tiny, random drafter", "tiny", (1, 16), "bastion drafter=random"),
    SetUp("hybrid", "hybrid", (1, 8)),
    SetUp("SmolLM2", REAL, (1, 4, 16), "bastion", 36.0),
    SetUp("0.6B, DFlash", "0.6B", (1, 4, 8), "bastion", 48.0),
    SetUp("0.6B, DFlash2", "0.6B", (1, 4, 8), "bastion drafter=dflash2", 48.0),
)


def decode(one: SetUp, other: Path, seconds: float | None, folder: Path) -> list[Row]:
    """What a set-up's engines decoded; `folder` is for prompts and results."""
    # Compiled code depends on the number of threads, which vLLM's cache does not know.
    os.environ["VLLM_CACHE_ROOT"] = str(cache_dir() / "compare" / "vllm")
    os.environ.pop("OMP_NUM_THREADS", None)
    dtype = ["--dtype", str(FAST_DTYPE).removeprefix("torch.")]
    if one.pair in ("tiny", "hybrid"):  # waking a second thread costs more than it saves
        os.environ["OMP_NUM_THREADS"], dtype = "1", []
    if one.words.endswith("dflash2"):
        pair_of(one.pair, kinds=("dflash2",))
    source = ROOT / "benchmarks" / "verify.jsonl" if one.pair == REAL else TINY / "prompts.jsonl"
    prompts = folder / "prompts.jsonl"  # without their domains: all are one set
    lines = [*islice(cycle(source.read_text().splitlines()), 64)]
    # Of one length, replies of plain decoding would end, and the next ones begin, in the same step.
    found = [
        {"prompt": json.loads(line)["prompt"], "params": {"max_tokens": 16 + 29 * i % 49}}
        for i, line in enumerate(lines)
    ]
    found += [row | _SHORT for row in found] * one.short
    prompts.write_text("".join(json.dumps(row) + "\n" for row in found))
    words = [
        "--pair", one.pair, "--methods", one.words, "--against", str(other), "--starts", "2",
        "--jsonl", str(prompts), "--samples", "64", "--alive", "3", "--passes", "50", *dtype,
        "--seconds", str((seconds or one.seconds) / 2), "--concurrency", *map(str, one.loads),
        "--out", str(folder / f"{one.name.replace(', ', '-')}.jsonl"),
    ]  # fmt: skip
    return e2e.run(e2e.parse(words), words, judged=False).rows


def lines_of(one: SetUp, rows: Sequence[Row]) -> Iterator[str]:
    """The table's lines: a line for each load and kind of reply."""
    rounds = [row for row in rows if row["kind"] == "round"]
    for load, name in dict.fromkeys((row["concurrency"], row["set"]) for row in rounds):
        own = [row for row in rounds if (row["concurrency"], row["set"]) == (load, name)]
        methods = by_method(own)
        plain, ours = methods.get(PLAIN, []), methods.get(one.words, [])
        theirs = next((found for method, found in methods.items() if " @ " in method), [])
        if not (plain and ours and theirs):
            continue
        between = by_start(theirs, ours)
        cells = [
            one.name + (f", {name}" if name == _SHORT["domain"] else ""), load,
            f"{geometric_mean(between):.3f}", ", ".join(f"{ratio:.3f}" for ratio in between),
            *(f"{geometric_mean(by_start(plain, found)):.3f}" for found in (ours, theirs)),
            *(f"{told['tau']:.2f}, {told['N']:.1f}" for told in map(numbers, (ours, theirs))),
            f"{numbers(plain)['tokens/s']:.0f}", len(ours),
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    for row in rows:
        if row["kind"] == "gap":
            yield f"| {one.name} | gap: {row['method']}: {row['reason']} |"
    starts = [f"{row['method']} {row['seconds']:.0f} s" for row in rows if row["kind"] == "start"]
    yield f"| {one.name} | starts: {', '.join(starts)} |"


_HEAD = (
    "set-up", "requests", "over the other", "by start", "over plain", "the other over plain",
    "tau, N", "the other's", "plain tokens/s", "rounds",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(benchmarks.compare.__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--seconds", type=float, help="of each load, in place of 20 to 48")
    parser.add_argument("--only", nargs="+", default=[one.name for one in SET_UPS])
    parser.add_argument("--out", type=Path, required=True, help="a folder that keeps every round")
    given = parser.parse_args(argv)
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    given.out.mkdir(parents=True, exist_ok=True)
    for one in SET_UPS:
        if one.name in given.only:
            lines += lines_of(one, decode(one, given.other, given.seconds, given.out))
            print("\n".join(lines), flush=True)
            (given.out / "table.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
