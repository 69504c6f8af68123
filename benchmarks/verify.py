# SPDX-License-Identifier: Apache-2.0
"""Ten minutes that tell whether all is well on a machine: identity, tau and speed of a pair.

    python -m benchmarks.verify Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16
    python -m benchmarks.verify TARGET DRAFTER --file prompts.jsonl    # `domain` and `prompt`

Decodes 20 prompts greedily, one at a time, with plain vLLM, vLLM's own chain of the drafter and
bastion, and exits with 0 if

    identity   every text of bastion is plain decoding's, or first differs where plain decoding
               finds both tokens equally good (`benchmarks.paper.judge`),
    tau        bastion emits at least as many tokens per forward as the chain; and for the pairs in
               `PUBLISHED` the chain reaches 70% of the paper's (its prompts are others),
    speed      bastion takes at most as long as the chain, unless --busy says that this machine is.

Prompts get the target's chat template, without thinking, as z-lab's drafters for Qwen3 expect.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks import parser_of
from benchmarks.harness.decoder import Run, count, engine_of, first_difference, run_engine
from benchmarks.harness.engine import Request, UserEngine, bastion, dflash
from benchmarks.paper.chat import Renderer
from benchmarks.paper.judge import Scorer, is_near_tie
from benchmarks.paper.methods import Method
from benchmarks.progress import Progress
from benchmarks.prompts import Prompt
from vllm_bastion.checkpoints.kinds import architectures_of, gamma_of, kind_of

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
PROMPTS = {
    "arithmetic": (
        "A shop sells pens at 3 dollars and notebooks at 5 dollars. Mia buys 4 pens and twice as "
        "many notebooks. How much does she pay?",
        "A train leaves at 9:40 and arrives at 13:05, with a stop of 15 minutes. For how many "
        "minutes does it move?",
        "Tom reads 12 pages on Monday and 5 more each following day. How many has he read by the "
        "end of Friday?",
        "A tank of 480 litres loses 15% in a week, then 34 litres more. How much is left?",
        "Three workers paint a fence in 8 hours. How long do four workers need at the same pace?",
        "The sum of three consecutive even numbers is 78. Which are they?",
        "A jacket costs 80 dollars after a discount of 20%. What did it cost before?",
    ),
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python function that checks whether a string of brackets is balanced.",
        "Implement binary search over a sorted list in Python, with type hints.",
        "Write a Python class for a stack with push, pop, peek and size.",
        "Write a Python function that returns the n-th Fibonacci number without recursion.",
        "Write a Python function that counts the words of a text and returns the ten most common.",
        "Write a SQL query for the three customers with the highest total of orders in 2024.",
    ),
    "chat": (
        "Explain step by step how binary search works.",
        "What is the difference between weather and climate?",
        "Give me a plan for a weekend in a city that I have never been to.",
        "Why is the sky blue? Explain it to a child of ten.",
        "Write a short letter to a neighbour whose dog barks at night.",
        "Name three ways to save energy at home, and say what each of them saves.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    requests, domains = _requests(given)
    runs = {}
    for name, engine in _engines(given).items():
        with Progress(name) as progress:
            runs[name] = run_engine(engine, requests, progress)
            progress.done(
                f"{runs[name].decode_s:.1f} s, tau {count(runs[name].completions).tau:.2f}"
            )
    differing = [
        (request, plain.token_ids, ours.token_ids)
        for request, plain, ours in zip(
            requests, runs["plain"].completions, runs["bastion"].completions, strict=True
        )
        if plain.token_ids != ours.token_ids
    ]
    errors = _errors(_engines(given)["plain"], differing, given.dtype)
    lines, passed = verdict(runs, domains, len(differing), errors, expected(given), given.busy)
    print("\n".join(lines))
    return 0 if passed else 1


def verdict(
    runs: dict[str, Run],
    domains: Sequence[str],
    differing: int,
    errors: int,
    published: dict[str, tuple[float, float]] | None,
    busy: bool,
) -> tuple[list[str], bool]:
    """The lines to print, and whether all is well.

    Args:
        runs: of "plain", "dflash" and "bastion".
        domains: of each request.
        differing: texts of bastion that are not plain decoding's.
        errors: those of them that no near-tie explains.
        published: tau by domain, of a chain and of trees.
        busy: whether times mean nothing.
    """
    lines, low = [f"{'':12s}{'tau: dflash':>12s}{'bastion':>9s}{'published':>14s}"], []
    for domain in (*dict.fromkeys(domains), "all"):
        taus = {
            name: count(
                done for done, own in zip(run.completions, domains, strict=True)
                if domain in (own, "all")
            ).tau
            for name, run in runs.items()
        }  # fmt: skip
        shown = ""
        if published is not None and domain in published:
            chain, trees = published[domain]
            shown = f"{chain:.2f}, {trees:.2f}"
            low += [domain] * (taus["dflash"] < _LEAST * chain)
        lines.append(f"{domain:12s}{taus['dflash']:12.2f}{taus['bastion']:9.2f}{shown:>14s}")
    tau_ok = taus["bastion"] >= taus["dflash"] and not low
    against = {name: runs[name].decode_s / runs["bastion"].decode_s for name in ("plain", "dflash")}
    speed_ok = against["dflash"] >= 1.0
    total = len(domains)
    why = (
        f"; the chain is below {_LEAST:.0%} of the published tau in {', '.join(low)}" if low else ""
    )
    speed = f"{against['plain']:.2f}x of plain decoding, {against['dflash']:.2f}x of vLLM's dflash"
    lines += [
        f"identity    {_word(not errors)}: {total - differing} of {total} texts are plain "
        f"decoding's, {differing - errors} differ at a near-tie, {errors} are wrong",
        f"tau         {_word(tau_ok)}: {taus['bastion']:.2f}, vLLM's dflash "
        f"{taus['dflash']:.2f}{why}",
        f"speed       {'not judged' if busy else _word(speed_ok)}: {speed}",
    ]
    return lines, not errors and tau_ok and (busy or speed_ok)


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def expected(given: argparse.Namespace) -> dict[str, tuple[float, float]] | None:
    """Published tau of this pair with the built-in prompts, by domain."""
    if given.file is not None:
        return None
    return PUBLISHED.get((Path(given.target).name, Path(given.drafter).name))


def _engines(given: argparse.Namespace) -> dict[str, UserEngine]:
    config = SimpleNamespace(**PretrainedConfig.get_config_dict(given.drafter)[0])
    kind, gamma = kind_of(architectures_of(config)), gamma_of(config)
    if kind is None or gamma is None:
        raise SystemExit(f"{given.drafter} is no drafter in z-lab's format")
    on_cpu = not torch.cuda.is_available()
    trees = bastion(Path(given.drafter), 63 if on_cpu else 255, "adaptive")
    chain = dflash(Path(given.drafter), gamma, kind.method)
    rows = (Method("plain", None), Method("dflash", chain), Method("bastion", trees, ours=True))
    names = ("dtype", "max_model_len", "max_num_batched_tokens", "eager")
    settings = {name: getattr(given, name) for name in names}
    return {
        row.name: row.engine(given.target, on_cpu, max_num_seqs=1, timed=True, **settings)
        for row in rows
    }


def _requests(given: argparse.Namespace) -> tuple[list[Request], list[str]]:
    from transformers import AutoTokenizer

    if given.file is None:
        rows = [(domain, text) for domain, texts in PROMPTS.items() for text in texts]
    else:
        read = [json.loads(line) for line in given.file.read_text("utf-8").splitlines()]
        rows = [(row["domain"], row["prompt"]) for row in read]
    step = max(1, len(rows) // given.prompts)
    rows = rows[::step][: given.prompts]
    tokenizer: Any = AutoTokenizer.from_pretrained(given.target)
    raw = given.file is not None or not tokenizer.chat_template
    renderer = Renderer(tokenizer, raw, given.max_model_len - given.tokens)
    requests = []
    for number, (domain, text) in enumerate(rows):
        name = f"{domain}-{number}"
        ids = renderer.ids(Prompt(domain, name, (text,)), [])
        requests.append(Request(name, ids, given.tokens))
    return requests, [domain for domain, _ in rows]


def _errors(
    engine: UserEngine, differing: list[tuple[Request, list[int], list[int]]], dtype: str
) -> int:
    """Texts whose first other token is no near-tie, by plain decoding's log-probabilities."""
    if not differing:
        return 0
    wrong = 0
    with engine_of(engine, Scorer) as process:
        for request, plain, ours in differing:
            at = first_difference(plain, ours)
            ids = [*request.prompt, *plain[:at]]
            wrong += not is_near_tie(process, ids, [plain[at], ours[at]], dtype)
    return wrong


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("target", help="name or folder")
    parser.add_argument("drafter", help="name or folder")
    parser.add_argument("--file", type=Path, help="prompts of your own, decoded as they are")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of each reply; EOS is ignored")
    parser.add_argument("--dtype", default="auto", help="float32 makes near-ties rare")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--busy", action="store_true", help="do not judge the speed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
