# SPDX-License-Identifier: Apache-2.0
"""Decode three prompts inside vLLM as plain, dflash and bastion, and draw a draft tree.

    make demo            or: python benchmarks/demo.py

Runs on a CPU: vLLM's own code with the small models of `benchmarks/tiny`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine import (
    TINY,
    Completion,
    Engine,
    Request,
    Run,
    bastion,
    count,
    dflash,
    load_prompts,
)
from benchmarks.probes import SeenTree
from benchmarks.progress import Progress
from benchmarks.running import RunningEngine

PROMPTS = ("code-made-05", "arithmetic-15", "chat-20")
NODES, TOKENS, WIDTH = 63, 64, 100
_MAX_TREE_LINES = 40
_COLOURS = {"accepted": "32;1", "rejected": "0", "note": "2", "title": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="ids in prompts.jsonl")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--drafter", type=Path, default=TINY / "drafter")
    given = parser.parse_args(argv)
    rows = {row["id"]: row for row in load_prompts(TINY / "prompts.jsonl")}
    prompts = [rows[name] for name in given.prompts]
    requests = [Request(row["id"], row["prompt"], TOKENS) for row in prompts]
    print(_title("Three prompts, three engines: vLLM on this CPU with the pair of benchmarks/tiny"))
    runs = decode(given.target, given.drafter, requests)
    for index, row in enumerate(prompts):
        print_completion(row, {name: run.completions[index] for name, run in runs.items()})
    print_numbers(prompts, runs)
    print_tree(given.target, prompts, runs["bastion"].probed)
    return 0


def decode(target: Path, drafter: Path, requests: list[Request]) -> dict[str, Run]:
    """Each engine in its own process: two start at a time, and each decodes alone."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {
            "plain": Engine(None, target, timed=True),
            "dflash": Engine(dflash(drafter), target, timed=True),
            "bastion": Engine(
                bastion(drafter, NODES, "adaptive", calibration=str(Path(folder) / "costs.json")),
                target,
                timed=True,
                probe="benchmarks.probes:trees",
            ),
        }
        progress = Progress("engines")
        running: dict[str, RunningEngine] = {}
        # The one that measures what its steps cost first: the others are through by then.
        for name in sorted(engines, key=lambda name: name != "bastion"):
            _let_start(running, progress, most=1)
            running[name] = RunningEngine(engines[name], requests, hold=True)
            stack.callback(running[name].close)
        _let_start(running, progress, most=0)
        progress.done(f"started in {progress.seconds:.0f} s")
        runs = {}
        for name in engines:
            progress = Progress(f"{name:7s}")
            running[name].release()
            runs[name] = running[name].result(progress)
            progress.done(f"done in {progress.seconds:.0f} s")
    return runs


def _let_start(running: dict[str, RunningEngine], progress: Progress, most: int) -> None:
    """Wait until at most so many engines are starting."""
    while len(names := [name for name, engine in running.items() if not engine.held]) > most:
        progress(f"starting {' and '.join(names)}")
        for name in names:
            running[name].poll()


def print_completion(row: dict[str, str], by_mode: dict[str, Completion]) -> None:
    """The prompt and its text, once where all modes agree."""
    print("\n" + _title(f"{row['domain']}  ({row['id']})"))
    _print_text(row["prompt"], "note")
    plain = by_mode["plain"]
    _print_text(plain.text, "accepted")
    other = [name for name, done in by_mode.items() if done.token_ids != plain.token_ids]
    if not other:
        print(f"  {len(plain.token_ids)} token ids, identical in plain, dflash and bastion")
    for name in other:
        at = _first_difference(by_mode[name].token_ids, plain.token_ids)
        print(f"  {name} differs from plain at token {at}:")
        _print_text(by_mode[name].text, "rejected")


def print_numbers(prompts: list[dict[str, str]], runs: dict[str, Run]) -> None:
    """tau, verified nodes, forwards, seconds."""
    print("\n" + _title("Tokens per target forward (tau)"))
    domains = [row["domain"] for row in prompts]
    head = "".join(f"{domain:>12s}" for domain in domains)
    print(f"  {'':10s}{head}{'all':>9s}{'forwards':>11s}{'verified':>11s}{'wall-clock':>13s}")
    for name, run in runs.items():
        taus = "".join(f"{count([done]).tau:12.2f}" for done in run.completions)
        total = count(run.completions)
        print(
            f"  {name:10s}{taus}{total.tau:9.2f}{total.forwards:11d}"
            f"{total.mean_verified:11.1f}{run.decode_s:11.1f} s"
        )
    notes = (
        "Forwards are the target's, all prompts together, those of the prompts themselves left"
        " out; verified: mean draft tokens (tree nodes) checked in one. bastion chose the number of"
        f" nodes each step, at most {NODES}, by what its steps cost here, measured at its start."
        " Wall-clock is one run of eager engines, one thread: the README has the table over 90"
        " prompts in vLLM's default mode. The models are toys, right about as often as real ones"
        " agree."
    )
    print(_style("note", _fill(notes)))


def print_tree(target: Path, prompts: list[dict[str, str]], trees: list[SeenTree]) -> None:
    """One step whose accepted path leaves the chain."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))

    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    def draw(seen: SeenTree) -> list[str]:
        tree = seen.tree().prefix(seen.num_verified)
        return tree.render(accepted=seen.path, decode=text, root=text(seen.root)).splitlines()

    # Worth looking at: it fits a screen, and the accepted path goes far beyond the chain's.
    seen = max(
        trees,
        key=lambda seen: (
            len(draw(seen)) <= _MAX_TREE_LINES,
            seen.accepted - seen.chain_length(),
            seen.accepted,
        ),
    )
    domain = prompts[seen.request]["domain"]
    print("\n" + _title(f"One step of {domain}, after {seen.position} tokens: the draft tree"))
    for line in draw(seen):
        shown = line if len(line) <= WIDTH - 2 else line[: WIDTH - 3] + "…"
        print("  " + _style("accepted" if "●" in line else "rejected", shown))
    facts = (
        "● accepted, ○ rejected; the number is the path score of a line's last node. One forward"
        f" of the target checked {seen.num_verified} of the {len(seen.tokens)} drafted nodes and"
        f" accepted {seen.accepted}, to which it added a token of its own. The drafter's first"
        f" choices alone, as in a chain, would have got {seen.chain_length()}."
    )
    print(_style("note", _fill(facts)))
    emitted = tokenizer.decode(seen.emitted, skip_special_tokens=False)
    print(f"  Emitted by this step: {emitted!r}")


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _print_text(text: str, kind: str) -> None:
    for line in text.strip("\n").splitlines():
        for part in textwrap.wrap(line, WIDTH - 4, drop_whitespace=False) or [""]:
            print(_style(kind, f"  │ {part}"))


def _fill(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _title(text: str) -> str:
    return _style("title", text)


def _style(kind: str, text: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_COLOURS[kind]}m{text}\033[0m"


if __name__ == "__main__":
    raise SystemExit(main())
