# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward (tau) of the tiny pair, replayed offline in plain torch.

The target's continuation of each prompt is computed once (greedy, or sampled at T=1 with fixed
seeds). Speculative decoding that draws a token at every node emits exactly this continuation, so
the acceptance walk can be replayed on it: at every step the drafter sees the tokens emitted so far,
and its chain or tree covers some of the next ones. tau = tokens emitted / target forwards, without
the prompt's own forward and its token.

`--check` compares the target with transformers' Qwen3ForCausalLM instead.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from checkpoints import AnyTarget, load_target
from drafter import BLOCK_SIZE, Drafter, load_drafter
from heads import CANDIDATES, Domino
from rollouts import continue_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
GAMMA = BLOCK_SIZE - 1
BUDGETS = (8, 16, 32, 63, 64, 128)
WIDTH = 16  # K: candidates of a depth, or of a row
NEW_TOKENS = 64
PROMISE = 63  # nodes of the trees whose A-hat is compared with the accepted length


class Lattice(NamedTuple):
    """Candidates of every block of a continuation, and the best of them given each predecessor.

    A blocks, D = gamma depths, K candidates per depth. A depth has P rows: one for each candidate
    of the depth above (the anchor's is the first), or one if the drafter ignores it.
    """

    tokens: Tensor  # [A, D, K]
    order: Tensor  # [A, D, P, W] the best candidates of a row, best first
    logprobs: Tensor  # [A, D, P, W]

    def block(self, anchor: int) -> Block:
        """One block as lists."""
        return Block(*(t[anchor].tolist() for t in self))


class Block(NamedTuple):
    """A lattice of one block."""

    tokens: list
    order: list
    logprobs: list

    def child(self, depth: int, above: int, rank: int) -> tuple[float, int]:
        """(log q, candidate) of a rank, given the candidate `above`."""
        row = min(above, len(self.order[depth]) - 1)
        return self.logprobs[depth][row][rank], self.order[depth][row][rank]


def best_first_tree(block: Block, budget: int) -> list[tuple[int, int, int, float]]:
    """The `budget` best nodes of the lattice as (parent, depth, token, score), parents first.

    A path's score is the product of its q. Node 0 is the root. When a node leaves the heap, its
    best child and its next-best sibling enter, so nodes leave in score order.
    """
    nodes: list[tuple[int, int, int, float]] = []
    heap: list[tuple] = []

    def push(base: float, parent: int, depth: int, above: int, rank: int) -> None:
        value, candidate = block.child(depth, above, rank)
        tie = len(heap) + 2 * len(nodes)
        heapq.heappush(heap, (-base - value, tie, base, parent, depth, above, rank, candidate))

    push(0.0, 0, 0, 0, 0)
    while heap and len(nodes) < budget:
        minus, _, base, parent, depth, above, rank, candidate = heapq.heappop(heap)
        nodes.append((parent, depth + 1, block.tokens[depth][candidate], math.exp(-minus)))
        if rank + 1 < len(block.order[depth][0]):
            push(base, parent, depth, above, rank + 1)
        if depth + 1 < len(block.tokens):
            push(-minus, len(nodes), depth + 1, candidate, 0)
    return nodes


class Drafts:
    """Chains and trees of every block of one continuation; trees are built on first use.

    Nodes leave the heap in score order, so the tree of a smaller budget is a prefix of a larger.
    """

    def __init__(self, lattice: Lattice) -> None:
        self.lattice = lattice
        self.chains = [self._chain(lattice.block(a)) for a in range(len(lattice.tokens))]
        self.trees: dict[int, dict[tuple[int, int], int]] = {}
        self.scores: dict[int, list[float]] = {}  # of the trees' nodes
        self.promised: list[tuple[float, int]] = []  # A-hat and accepted nodes, budget PROMISE

    @staticmethod
    def _chain(block: Block) -> list[int]:
        """The chain of best tokens, as vLLM's own speculators draft at T=0."""
        tokens, candidate = [], 0
        for depth, row in enumerate(block.tokens):
            candidate = block.child(depth, candidate, 0)[1]
            tokens.append(row[candidate])
        return tokens

    def accepted(self, anchor: int, truth: list[int], budget: int | None) -> int:
        """Draft tokens accepted at a block if the target emits `truth`; budget None: the chain."""
        depth, gamma = 0, len(self.chains[anchor])
        if budget is None:
            while depth < gamma and self.chains[anchor][depth] == truth[depth]:
                depth += 1
            return depth
        if anchor not in self.trees:
            nodes = best_first_tree(self.lattice.block(anchor), max(BUDGETS))
            self.trees[anchor] = {(parent, t): i for i, (parent, _, t, _) in enumerate(nodes, 1)}
            self.scores[anchor] = [score for *_, score in nodes]
        node = 0
        while depth < gamma:
            node = self.trees[anchor].get((node, truth[depth]), budget + 1)
            if node > budget:
                break
            depth += 1
        if budget == PROMISE:
            self.promised.append((sum(self.scores[anchor][:budget]), depth))
        return depth


def walk(drafts: Drafts, ids: list[int], start: int, budget: int | None) -> tuple[int, int]:
    """(tokens, target forwards) from position `start`, the first new token.

    Block i of `drafts` is at position start + i, up to the last block.
    """
    at, forwards = start, 0
    while at - start < len(drafts.chains) - 1:
        truth = ids[at + 1 : at + 1 + GAMMA]
        at += drafts.accepted(at - start, truth, budget) + 1
        forwards += 1
    return at - start, forwards


@torch.inference_mode()
def draft(
    target: AnyTarget,
    drafter: Drafter,
    ids: Tensor,
    start: int,
    width: int = WIDTH,
    blocks: int = NEW_TOKENS,
) -> Lattice:
    """The drafts of every block of a continuation: ids [L]."""
    anchors = torch.arange(start, start + blocks)[None]
    _, features = target(ids[None], features=target.feature_layers)
    states = drafter(target, features, ids[anchors], anchors)[0]
    log_q = drafter.plain_logits(target, states).float().log_softmax(-1)
    if drafter.head is None:
        logprobs, tokens = log_q.topk(width, dim=-1)
        if drafter.vocabulary is not None:
            tokens = drafter.vocabulary[tokens]
        rows = logprobs[:, :, None]
        return Lattice(tokens, torch.arange(width).expand_as(rows), rows)
    if isinstance(drafter.head, Domino):
        raise SystemExit("its scores depend on whole paths, which are not replayed here")
    values, tokens = log_q.topk(CANDIDATES, dim=-1)
    above = torch.cat([ids[anchors[0], None, None].expand_as(tokens[:, :1]), tokens[:, :-1]], 1)
    bias = drafter.head.bias(above, states[:, :, None])  # [A, D, P, V]
    wanted = tokens[:, :, None].expand(-1, -1, CANDIDATES, -1)
    scores = values[:, :, None] + bias.gather(-1, wanted)
    logprobs, order = scores.log_softmax(-1).topk(min(width, CANDIDATES), dim=-1)
    return Lattice(tokens, order, logprobs)


def loops(ids: list[int]) -> bool:
    """Whether the continuation ends in a repetition of at most 12 tokens."""
    tail = ids[-48:]
    return any(tail[p:] == tail[:-p] for p in range(1, 13))


def table(
    target: AnyTarget, drafter: Drafter, prompts: list[dict], tok, temperature: float, samples: int,
    width: int,
) -> None:  # fmt: skip
    """Print tau per domain for one temperature."""
    counts: dict[tuple[str, int | None], list[int]] = defaultdict(lambda: [0, 0])
    looping: dict[str, list[bool]] = defaultdict(list)
    promised: list[tuple[float, int]] = []
    length = NEW_TOKENS + 2 * BLOCK_SIZE
    for number, row in enumerate(prompts):
        prompt = torch.tensor([tok(row["prompt"])["input_ids"]])
        start = prompt.shape[1]
        heat = torch.full((samples,), temperature)
        many = continue_batch(target, prompt.repeat(samples, 1), start + length, heat, seed=number)
        for ids in many:
            drafts = Drafts(draft(target, drafter, ids, start, width))
            names = [row["domain"]]
            if row["domain"] == "code":
                names.append("  " + row["id"].rsplit("-", 1)[0])
            for budget in (None, *BUDGETS):
                tokens, forwards = walk(drafts, ids.tolist(), start, budget)
                for name in names:
                    counts[name, budget][0] += tokens
                    counts[name, budget][1] += forwards
            promised += drafts.promised
            for name in names:
                looping[name].append(loops(ids[start : start + NEW_TOKENS].tolist()))
    names = sorted(
        looping,
        key=lambda n: (["code", "arithmetic", "chat"].index(n.strip().split("-")[0]), n.strip()),
    )
    print(
        f"\n| T={temperature:g} | chain | "
        + " | ".join(map(str, BUDGETS))
        + " | 64/chain | loops |"
    )
    print("|---|" + "---|" * (len(BUDGETS) + 3))
    means: dict[int | None, float] = dict.fromkeys((None, *BUDGETS), 0.0)
    for name in names:
        taus = {b: counts[name, b][0] / counts[name, b][1] for b in means}
        if not name.startswith(" "):
            means = {b: means[b] + taus[b] / 3 for b in means}
        _print_row(name, taus, f"{sum(looping[name])}/{len(looping[name])}")
    _print_row("mean of the domains", means, "")
    expected, accepted = torch.tensor(promised).double().T
    covariance = torch.cov(torch.stack([expected, accepted]))
    print(
        f"\nA-hat of {PROMISE} nodes: mean {expected.mean():.2f}, accepted {accepted.mean():.2f}, "
        f"Pearson {torch.corrcoef(torch.stack([expected, accepted]))[0, 1]:.3f}, "
        f"slope of accepted over A-hat {covariance[0, 1] / covariance[0, 0]:.3f}"
    )


def _print_row(name: str, taus: dict[int | None, float], last: str) -> None:
    cells = [f"{tau:.2f}" for tau in taus.values()] + [f"{taus[64] / taus[None]:.2f}", last]
    print(
        f"| {name.strip() if name[0] != ' ' else '- ' + name.strip()} | " + " | ".join(cells) + " |"
    )


def check(folder: Path, target: AnyTarget, prompts: list[dict], tok) -> None:
    """Largest difference to transformers in logits and in the drafter's features."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = [0.0, 0.0]
    with torch.inference_mode():
        for row in prompts[::10]:
            ids = torch.tensor([tok(row["prompt"])["input_ids"]])
            theirs = reference(ids, output_hidden_states=True)
            hidden, features = target(ids, features=target.feature_layers)
            picked = torch.cat([theirs.hidden_states[i + 1] for i in target.feature_layers], -1)
            worst[0] = max(worst[0], float((theirs.logits - target.logits(hidden)).abs().max()))
            worst[1] = max(worst[1], float((picked - features).abs().max()))
    print(f"largest difference to transformers: logits {worst[0]:.1e}, features {worst[1]:.1e}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--drafter", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--samples", type=int, default=2, help="continuations per prompt at T=1")
    parser.add_argument("--stride", type=int, default=1, help="use every n-th prompt")
    parser.add_argument("--width", type=int, default=WIDTH, help="candidates of a depth")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(args.target)
    tok = AutoTokenizer.from_pretrained(args.target)
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    prompts = prompts[:: args.stride]
    if args.check:
        check(args.target, target, prompts, tok)
        return
    drafter = load_drafter(args.drafter)
    table(target, drafter, prompts, tok, 0.0, 1, args.width)
    if args.samples:
        table(target, drafter, prompts, tok, 1.0, args.samples, args.width)


if __name__ == "__main__":
    main()
