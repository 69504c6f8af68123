# SPDX-License-Identifier: Apache-2.0
"""Ten minutes that tell whether all is well on a machine: identity, tau and speed of a pair.

    python -m benchmarks.verify Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16
    python -m benchmarks.verify TARGET DRAFTER --file prompts.jsonl    # `domain` and `prompt`

Decodes 20 prompts greedily, one at a time, with plain vLLM, vLLM's own chain of the drafter and
bastion (`benchmarks.e2e`), and exits with 0 if

    identity   every text of bastion is plain decoding's, or first differs where plain decoding
               finds both tokens equally good (`benchmarks.e2e.judge`),
    tau        bastion emits at least as many tokens per forward as the chain; and for the pairs in
               `PUBLISHED` the chain reaches 70% of the paper's (its prompts are others),
    speed      bastion takes at most as long as the chain.

With --busy, because other processes slow down this machine, the last one is not judged, and tau
only against the paper's: steps whose times mean nothing make trees small.
Prompts get the target's chat template, without thinking, as z-lab's drafters for Qwen3 expect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT, parser_of
from benchmarks.e2e import main as e2e
from benchmarks.e2e.methods import PLAIN
from benchmarks.e2e.report import numbers
from benchmarks.e2e.store import Row
from benchmarks.prompts import DataError

CHAIN, TREES = "dflash", "bastion"
PROMPTS = ROOT / "benchmarks" / "verify.jsonl"
# Of each domain: tau of DFlash's chain and of BASTION's trees on GSM8K, HumanEval and MT-Bench at
# T=0 on an A100, from the BASTION paper's table of results.
PUBLISHED = {
    ("Qwen3-4B", "Qwen3-4B-DFlash-b16"): {
        "arithmetic": (6.50, 9.07), "code": (6.66, 9.38), "chat": (4.63, 6.58),
    },
    ("Qwen3-8B", "Qwen3-8B-DFlash-b16"): {
        "arithmetic": (6.51, 8.85), "code": (6.64, 9.44), "chat": (4.46, 6.28),
    },
}  # fmt: skip
_LEAST = 0.7


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("target", help="name or folder")
    parser.add_argument("drafter", help="name or folder")
    parser.add_argument("--file", type=Path, help="prompts of your own, decoded as they are")
    parser.add_argument("--samples", type=int, default=7, help="prompts of each domain")
    parser.add_argument("--tokens", type=int, default=256, help="of each reply; EOS is ignored")
    parser.add_argument("--dtype", default="auto", help="float32 makes near-ties rare")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--busy", action="store_true", help="do not judge by times")
    given = parser.parse_args(argv)
    words = [
        "--target", given.target, "--drafter", given.drafter, "--methods", CHAIN, TREES,
        "--jsonl", str(given.file or PROMPTS), "--samples", str(given.samples),
        "--tokens", str(given.tokens), "--dtype", given.dtype, "--ignore-eos", "--alive", "1",
    ]  # fmt: skip
    words += ["--raw"] * (given.file is not None) + ["--eager"] * given.eager
    names = Path(given.target).name, Path(given.drafter).name
    try:
        rows = e2e.run(e2e.parse(words), words).rows
    except DataError as error:
        parser.error(str(error))
    lines, passed = verdict(rows, PUBLISHED.get(names) if given.file is None else None, given.busy)
    print("\n".join(lines))
    return 0 if passed else 1


def verdict(
    rows: Sequence[Row], published: dict[str, tuple[float, float]] | None, busy: bool
) -> tuple[list[str], bool]:
    """The lines to print, and whether all is well.

    Args:
        rows: of a results file.
        published: tau by domain, of a chain and of trees.
        busy: whether times mean nothing.
    """
    gaps = [f"{row['method']} does not run: {row['reason']}" for row in rows if "reason" in row]
    if gaps:
        return gaps, False
    runs = {
        name: [row for row in rows if row["kind"] == "round" and row["method"] == name]
        for name in (PLAIN, CHAIN, TREES)
    }
    domains = list(dict.fromkeys(row["set"] for row in runs[PLAIN]))
    lines, low = [f"{'':12s}{'tau: dflash':>12s}{'bastion':>9s}{'published':>14s}"], []
    for domain in (*domains, "all"):
        own = {
            name: numbers([row for row in runs[name] if domain in (row["set"], "all")])["tau"]
            for name in (CHAIN, TREES)
        }
        shown = ""
        if published is not None and domain in published:
            chain, trees = published[domain]
            shown = f"{chain:.2f}, {trees:.2f}"
            low += [domain] * (own[CHAIN] < _LEAST * chain)
        lines.append(f"{domain:12s}{own[CHAIN]:12.2f}{own[TREES]:9.2f}{shown:>14s}")
    seconds = {name: sum(row["seconds"] for row in own) for name, own in runs.items()}
    differing = sum(len(row["differs"]) for row in runs[TREES])
    judged = [row for row in rows if row["kind"] == "judged" and row["method"] == TREES]
    near = sum(row["near_tie"] for row in judged)
    total = sum(row["responses"] for row in runs[TREES])
    taus = {name: numbers(runs[name])["tau"] for name in (CHAIN, TREES)}
    tau_ok = (busy or taus[TREES] >= taus[CHAIN]) and not low
    speed_ok = seconds[TREES] <= seconds[CHAIN]
    why = f"; the chain is below {_LEAST:.0%} of the published tau in {', '.join(low)}" * bool(low)
    lines += [
        f"identity    {_word(differing == near)}: {total - differing} of {total} texts are plain "
        f"decoding's, {near} differ at a near-tie, {differing - near} are wrong",
        f"tau         {_word(tau_ok)}: {taus[TREES]:.2f}, vLLM's dflash {taus[CHAIN]:.2f}{why}",
        f"speed       {'not judged' if busy else _word(speed_ok)}: "
        f"{seconds[PLAIN] / seconds[TREES]:.2f}x of plain decoding, "
        f"{seconds[CHAIN] / seconds[TREES]:.2f}x of vLLM's dflash",
    ]
    return lines, differing == near and tau_ok and (busy or speed_ok)


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


if __name__ == "__main__":
    sys.exit(main())
