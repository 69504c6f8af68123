# SPDX-License-Identifier: Apache-2.0
"""What a narrow frontier loses: trees of the tiny pair's Domino drafter, replayed offline.

    python -m benchmarks.frontier            # results/domino.md

Trees over a head with a state grow from the B best prefixes of every depth. With B >= N they are
those of a search over all prefixes. For each N and B the table has the tokens per forward (tau) of
greedy decoding, replayed on the target's own continuations as in `benchmarks/tiny/evaluate.py`, and
the share of the trees' promised tokens (the sum of their path scores) that the search over all
prefixes would have promised. A last line counts how often the greedy chain's next token is beyond
the best uncorrected tokens that are corrected.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import benchmarks.widen  # noqa: F401  (finds benchmarks/tiny)
from bastion_kernels import PrefixHead, PrefixLattice, expand_best_first, recurrent_lattice
from benchmarks import RESULTS, TINY
from benchmarks.prompts import DOMAINS, load_prompts

from checkpoints import load_target  # isort: skip
from drafter import BLOCK_SIZE, load_drafter  # isort: skip
from rollouts import continue_batch  # isort: skip

NODES, WIDTHS = (16, 32, 63), (4, 8, 16, 32, 64)
NEW_TOKENS, GAMMA = 64, BLOCK_SIZE - 1
CANDIDATES, TOP_K = 32, 16
LONGEST = 255  # candidates of a chain
RECORDED = Path(__file__).resolve().parents[1] / "tests" / "drafters" / "specforge_chains.json"


def head_of(drafter: torch.nn.Module) -> PrefixHead:
    """The weights of a tiny Domino drafter's head."""
    head = drafter.head
    gru, project = head.prefix_gru, head.embed_proj
    return PrefixHead(gru.weight_ih_l0, gru.weight_hh_l0, project[0].weight, project[2].weight)


def accepted(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """Nodes of one tree that greedy decoding accepts."""
    children = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True), 1)}
    node, depth = 0, 0
    while depth < len(truth) and (node, truth[depth]) in children:
        node, depth = children[node, truth[depth]], depth + 1
    return depth


def walk(depths: list[int]) -> tuple[int, int]:
    """(tokens, forwards), given how many nodes are accepted at each position."""
    at, forwards = 0, 0
    while at < NEW_TOKENS - 1:
        at += depths[at] + 1
        forwards += 1
    return at, forwards


@torch.inference_mode()
def study(prompts: list[dict], drafter_folder: Path) -> tuple[dict, dict, dict]:
    """Tokens and forwards by (N, B, domain), promised tokens by (N, B), and ranks of chains."""
    from transformers import AutoTokenizer

    target, drafter = load_target(TINY / "target"), load_drafter(drafter_folder)
    tok = AutoTokenizer.from_pretrained(TINY / "target")
    head = head_of(drafter)
    counts: dict = {(n, b, d): [0, 0] for n in NODES for b in WIDTHS for d in DOMAINS}
    promised: dict = {(n, b): 0.0 for n in NODES for b in WIDTHS}
    beyond: dict = {"all": 0, 32: 0, 255: 0}
    for row in prompts:
        prompt = torch.tensor([tok(row["prompt"])["input_ids"]])
        start = prompt.shape[1]
        length = start + NEW_TOKENS + 2 * BLOCK_SIZE
        ids = continue_batch(target, prompt, length, torch.zeros(1))[0]
        anchors = torch.arange(start, start + NEW_TOKENS)[None]
        _, features = target(ids[None], features=target.feature_layers)
        states = drafter(target, features, ids[anchors], anchors)[0]  # [A, D, H]
        logits = target.logits(states)
        base, tokens = logits.topk(CANDIDATES, dim=-1)
        embed = target.embed_tokens
        for width in WIDTHS:
            shape = (*tokens.shape[:2], width, CANDIDATES)
            lattice = PrefixLattice.empty(*shape, tokens.device)
            recurrent_lattice(
                head, head.prepared(), embed, ids[anchors[0]], tokens.int(), tokens, base, states,
                TOP_K, lattice,
            )  # fmt: skip
            for nodes in NODES:
                out, parents, scores = grow(tokens, lattice.logprobs, lattice.rows, nodes)
                promised[nodes, width] += float(scores.exp().sum())
                depths = [
                    accepted(*tree, ids[at + 1 : at + 1 + GAMMA].tolist())
                    for at, *tree in zip(
                        anchors[0].tolist(), out.tolist(), parents.tolist(), strict=True
                    )
                ]
                got = walk(depths)
                for i in (0, 1):
                    counts[nodes, width, row["domain"]][i] += got[i]
        count_ranks(head, embed, logits, states, ids[anchors[0]], beyond)
    return counts, promised, beyond


def grow(tokens: Tensor, logprobs: Tensor, rows: Tensor, nodes: int) -> tuple[Tensor, ...]:
    """Tokens, parents and path scores of trees [A, N]."""
    reqs = len(tokens)
    out = torch.zeros(reqs, nodes, dtype=torch.int64)
    parents, depths = (torch.zeros(reqs, nodes, dtype=torch.int32) for _ in range(2))
    scores, sizes = torch.zeros(reqs, nodes), torch.zeros(reqs, dtype=torch.int32)
    expand_best_first(
        tokens.int(), logprobs, TOP_K, torch.arange(reqs), out, parents, depths, scores, sizes, rows
    )
    return out, parents, scores


def count_ranks(
    head: PrefixHead,
    embed: torch.nn.Embedding,
    logits: Tensor,
    states: Tensor,
    anchors: Tensor,
    beyond: dict,
) -> None:
    """Follow greedy chains over the whole vocabulary; count tokens beyond the best by rank."""
    hidden, cell = states.shape[-1], torch.nn.GRUCell(states.shape[-1], head.weight_hh.shape[1],
                                                      bias=False)  # fmt: skip
    cell.weight_ih, cell.weight_hh = (
        torch.nn.Parameter(w, requires_grad=False) for w in (head.weight_ih, head.weight_hh)
    )
    state, last = torch.zeros(len(anchors), head.weight_hh.shape[1]), anchors
    assert hidden == head.first.shape[1] - state.shape[1]
    for depth in range(states.shape[1]):
        state = cell(embed(last), state)
        latent = torch.cat([states[:, depth], state], dim=-1) @ head.first.mT
        corrected = logits[:, depth] + torch.nn.functional.silu(latent) @ head.last.mT
        last = corrected.argmax(-1)
        rank = (logits[:, depth] > logits[:, depth].gather(1, last[:, None])).sum(1)
        beyond["all"] += len(rank)
        for most in (32, 255):
            beyond[most] += int((rank >= most).sum())


def markdown(counts: dict, promised: dict, beyond: dict, prompts: int) -> str:
    """The table."""
    lines = [
        f"Trees of the tiny pair's Domino drafter by the width of the frontier, {prompts} prompts, "
        "replayed offline.",
        "",
        "| N | B | " + " | ".join(DOMAINS) + " | mean tau | promised, of a search over all |",
        "|---|---|" + "---|" * (len(DOMAINS) + 2),
    ]
    for n in NODES:
        for b in WIDTHS:
            taus = [counts[n, b, d][0] / max(counts[n, b, d][1], 1) for d in DOMAINS]
            share = promised[n, b] / promised[n, max(WIDTHS)]
            cells = [f"{tau:.2f}" for tau in (*taus, sum(taus) / len(taus))]
            lines.append(f"| {n} | {b} | {' | '.join(cells)} | {100 * share:.2f}% |")
    lines += [
        "",
        f"Of {beyond['all']} tokens of greedy chains over the whole vocabulary, {beyond[32]} are "
        f"beyond the 32 best uncorrected ones of their position and {beyond[255]} beyond the 255 "
        "best, which a chain corrects.",
        "",
        *notes(),
        f"`python -m benchmarks.frontier --prompts {prompts // len(DOMAINS)}`",
        "",
    ]
    return "\n".join(lines)


def notes() -> list[str]:
    """What does not come from the replay."""
    from vllm_bastion.drafters.domino import WIDTH

    recorded = json.loads(RECORDED.read_text())
    ranks = [rank for row in recorded["rows"] for rank in row["ranks"]]
    same, library = sum(rank < LONGEST for rank in ranks), f"SpecForge {recorded['specforge']}"
    kept = GAMMA * CANDIDATES * 8 * (1 + WIDTH)  # a token or a row and a score each
    sizes = [f"{kept * reqs / 2**20:.1f} MiB for {reqs} requests" for reqs in (8, 64)]
    return [
        f"An engine uses B = {WIDTH} in a batch of any size, because trees are grown before their "
        f"budget is chosen. It keeps {kept / 2**10:.0f} KiB per request for candidates and "
        f"prefixes ({', '.join(sizes)}).",
        "",
        f"With the same weights, {library}'s own model and sampler draft the same greedy chain at "
        f"{same} of {len(ranks)} positions of 6 prompts, token for token. Each of the others has "
        f"a token beyond the {LONGEST} best uncorrected ones "
        "(`tests/drafters/test_specforge.py`).",
        "",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", type=Path, default=TINY / "domino")
    parser.add_argument("--prompts", type=int, default=30, help="per domain (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    prompts = load_prompts(TINY / "prompts.jsonl", given.prompts)
    table = markdown(*study(prompts, given.drafter), len(prompts))
    (given.out / "domino.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
