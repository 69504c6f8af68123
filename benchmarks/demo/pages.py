# SPDX-License-Identifier: Apache-2.0
"""What the demo prints: texts, numbers, a draft tree."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from benchmarks.harness.driver import Response
from benchmarks.harness.steps import first_difference
from benchmarks.probes import SeenTree

WIDTH = 100
_MAX_TREE_LINES = 40
_COLOURS = {"accepted": "32;1", "rejected": "0", "note": "2", "title": "1"}


class Streamed:
    """Prints what an engine emits as soon as it is emitted.

    name: the engine's, for the headings.
    """

    def __init__(
        self, tokenizer: Tokenizer, name: str, domains: Sequence[str], texts: Sequence[str]
    ) -> None:
        self._tokenizer, self._name, self._domains, self._texts = tokenizer, name, domains, texts
        self._number, self._ids, self._shown = -1, list[int](), ""

    def __call__(self, item: tuple[int, list[int]]) -> None:
        """Print an item of `Decoder.decode`: the number of a request, and new token ids."""
        number, ids = item
        if number != self._number:
            self.end()
            self._number, self._ids, self._shown = number, [], ""
            print(title(f"{self._name}: {self._domains[number]}"))
            print_text(self._texts[number], "note")
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character
            print(style("accepted", text[len(self._shown) :]), end="", flush=True)
            self._shown = text

    def end(self) -> None:
        if self._number >= 0:
            print("\n")


def print_same(domain: str, tokenizer: Tokenizer, by_mode: dict[str, list[int]]) -> None:
    """Whether plain and bastion have the same tokens, or both texts."""
    print(title("The same tokens, in float32"))
    plain, ours = by_mode["plain"], by_mode["bastion"]
    if ours == plain:
        print(f"  {domain}: {len(plain)} token ids, identical in plain and bastion")
        return
    print(f"  {domain}: bastion differs from plain at token {first_difference(ours, plain)}:")
    for ids in (plain, ours):
        print_text(tokenizer.decode(ids), "rejected")


def print_numbers(domains: Sequence[str], runs: dict[str, list[Response]]) -> None:
    print("\n" + title("Tokens per target forward (tau), and seconds"))
    head = "".join(f"{domain:>12s}" for domain in domains)
    print(f"  {'':10s}{head}{'all':>8s}{'verified':>10s}{'forwards':>10s}{'seconds':>10s}{'':>8s}")
    seconds = {name: run[-1].end_s - run[0].begin_s for name, run in runs.items()}
    for name, run in runs.items():
        taus = "".join(f"{one.emitted / max(1, one.forwards):12.2f}" for one in run)
        forwards = sum(one.forwards for one in run)
        tau = sum(one.emitted for one in run) / max(1, forwards)
        verified = sum(one.verified for one in run) / max(1, forwards)
        ratio = f"{seconds['plain'] / seconds[name]:.2f}x"
        print(
            f"  {name:10s}{taus}{tau:8.2f}{verified:10.1f}{forwards:10d}{seconds[name]:10.2f}"
            f"{ratio:>8s}"
        )


def print_notes(nodes: int, chain: int) -> None:
    """How to read the numbers. chain: the length of dflash's drafts."""
    notes = (
        "Forwards: forward passes of the target for all prompts together, without those over the"
        " prompts; verified: mean draft tokens (tree nodes) in one. In each step bastion chose the"
        f" number of nodes, at most {nodes}, by the step costs that it measured at its start;"
        f" dflash drafts {chain} tokens. Plain and dflash run without this plugin. Seconds are"
        " one run of eager engines, in bfloat16, where this target's best two tokens are often"
        " equally good, so that texts differ between engines: the README has the table of many"
        " prompts in vLLM's default mode."
    )
    print(style("note", _fill(notes)))


def print_tree(tokenizer: Tokenizer, domains: Sequence[str], trees: list[SeenTree]) -> None:
    """The tree of one step, preferably one whose accepted path leaves the chain."""
    if not trees:
        print("\nbastion verified no tree: by the step costs measured here, no draft paid for one.")
        return

    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    # Prefer a tree that fits the screen and accepts far more than the chain.
    seen = max(
        trees,
        key=lambda seen: (
            len(draw_tree(seen, text)) <= _MAX_TREE_LINES,
            seen.accepted - seen.chain_length(),
            seen.accepted,
        ),
    )
    domain = domains[seen.request]
    print("\n" + title(f"One step of {domain}, after {seen.position} tokens: the draft tree"))
    for line in draw_tree(seen, text):
        shown = line if len(line) <= WIDTH - 2 else line[: WIDTH - 3] + "…"
        print("  " + style("accepted" if "●" in line else "rejected", shown))
    facts = (
        "● accepted, ○ rejected; the number is the path score of a line's last node. One forward"
        f" of the target verified {seen.num_verified} of {len(seen.tokens)} drafted nodes, accepted"
        f" {seen.accepted} and added a token of its own. A chain of the drafter's first choices"
        f" would have had {seen.chain_length()} accepted."
    )
    print(style("note", _fill(facts)))
    emitted = tokenizer.decode(seen.emitted, skip_special_tokens=False)
    print(f"  Emitted by this step: {emitted!r}")


def draw_tree(seen: SeenTree, decode: Callable[[int], str]) -> list[str]:
    """The verified nodes: best child first, a run of single children on a line.

    Nodes of the accepted path have a filled dot; the number is the path score of a line's last one.

    Args:
        decode: text of a token id.
    """
    children: list[list[int]] = [[] for _ in range(seen.num_verified + 1)]
    for node in range(1, len(children)):
        children[seen.parents[node - 1]].append(node)
    lines = [f"● {_printable(decode(seen.root))}"]

    def draw(node: int, indent: str, last: bool) -> None:
        run, accepted = [node], node in seen.path
        while len(children[run[-1]]) == 1 and (children[run[-1]][0] in seen.path) == accepted:
            run.append(children[run[-1]][0])
        text = " ".join(_printable(decode(seen.tokens[one - 1])) for one in run)
        score = math.exp(seen.log_rho[run[-1] - 1])
        branch = "└─" if last else "├─"
        lines.append(f"{indent}{branch}{'●' if accepted else '○'} {text}  {score:.2g}")
        below = children[run[-1]]
        for child in below:
            draw(child, indent + ("  " if last else "│ "), child == below[-1])

    for child in children[0]:
        draw(child, "", child == children[0][-1])
    return lines


def _printable(text: str) -> str:
    """Make spaces and control characters visible, so that a token cannot break the drawing."""
    text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(char if char.isprintable() else "�" for char in text) or "∅"


def print_text(text: str, kind: str) -> None:
    for line in text.strip("\n").splitlines():
        for part in textwrap.wrap(line, WIDTH - 4, drop_whitespace=False) or [""]:
            print(style(kind, f"  │ {part}"))


def _fill(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def title(text: str) -> str:
    return style("title", text)


def style(kind: str, text: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_COLOURS[kind]}m{text}\033[0m"
