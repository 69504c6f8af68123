# SPDX-License-Identifier: Apache-2.0
"""Milliseconds from a drafter's hidden states to its trees: DFlash, DFlash2 and Domino.

    python -m benchmarks.draft_time [--repeats 200] [--requests 1 8]

Everything after the backbone, which all three share: the output head's product, the candidates,
DFlash2's scores of neighbouring candidates (vLLM's own function) or Domino's rounds over prefixes,
and the tree of 63 nodes. The three take turns in one process, on random weights in the sizes of the
tiny pair (float32) and of published heads on Qwen3-0.6B's shape (bfloat16), D = 15. Medians, the
least, and the ratio of medians to DFlash's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.models.qwen3_dflash2 import _score_edges

from bastion_kernels import (
    PrefixHead,
    PrefixLattice,
    expand_best_first,
    recurrent_lattice,
    topk_logprobs,
)
from benchmarks.cpu_ops import DEPTH, NODES, PAIRS, TOP_K, Sizes, milliseconds
from vllm_bastion.drafters.domino import WIDTH

DFLASH = "DFlash"
# Candidates of a position and the rank of the scores, and Domino's state.
HEADS = {"tiny": (32, 96, 192, 192), "0.6B": (32, 256, 256, 1024)}


def drafts(
    sizes: Sizes, heads: tuple[int, int, int, int], reqs: int
) -> dict[str, Callable[[], object]]:
    """From hidden states to trees, by drafter."""
    torch.manual_seed(0)
    candidates, selector, rank, state = heads
    vocab, hidden = sizes.vocab, sizes.hidden

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape).mul_(shape[-1] ** -0.5).to(sizes.dtype)

    states, head, embedding = (
        noise(reqs * DEPTH, hidden),
        noise(vocab, hidden),
        noise(vocab, hidden),
    )
    of_block = states.view(reqs, DEPTH, hidden)
    slots, anchors = torch.arange(reqs), torch.arange(reqs)
    tree = (
        torch.zeros(reqs, NODES, dtype=torch.int64),
        *(torch.zeros(reqs, NODES, dtype=torch.int32) for _ in range(2)),
        torch.zeros(reqs, NODES),
        torch.zeros(reqs, dtype=torch.int32),
    )

    def best(count: int) -> tuple[Tensor, Tensor]:
        ids = torch.empty(reqs * DEPTH, count, dtype=torch.int32)
        scores = torch.empty(reqs * DEPTH, count)
        topk_logprobs(F.linear(states, head), count, ids, scores)
        return ids.view(reqs, DEPTH, count), scores.view(reqs, DEPTH, count)

    def dflash() -> None:
        ids, scores = best(TOP_K)
        expand_best_first(ids, scores[:, :, None], TOP_K, slots, *tree)

    before, after, projection = (
        noise(vocab, selector),
        noise(vocab, selector),
        noise(selector, hidden),
    )

    def dflash2() -> None:
        found = F.linear(states, head).topk(candidates, dim=-1)
        shape = (reqs, DEPTH, candidates)
        ids, logits = found.indices.view(shape), found.values.view(shape)
        scores = _score_edges(
            before, after, ids, logits, F.linear(of_block, projection), anchors, candidates
        )
        expand_best_first(ids.int(), scores.float().log_softmax(-1), TOP_K, slots, *tree)

    gru = noise(3 * state, hidden), noise(3 * state, state)
    prefix = PrefixHead(*gru, noise(rank, hidden + state), noise(vocab, rank))
    prepared = prefix.prepared()
    lattice = PrefixLattice.empty(reqs, DEPTH, WIDTH, candidates, states.device)

    def domino() -> None:
        ids, scores = best(candidates)
        recurrent_lattice(
            prefix, prepared, lambda rows: F.embedding(rows, embedding), anchors, ids, ids, scores,
            of_block, TOP_K, lattice,
        )  # fmt: skip
        expand_best_first(ids, lattice.logprobs, TOP_K, slots, *tree, lattice.rows)

    return {
        "output head": lambda: F.linear(states, head),
        DFLASH: dflash,
        "DFlash2": dflash2,
        "Domino": domino,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args(argv)
    # the first matrix product asks the operating system for AMX, as in an engine
    torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()
    print(f"{torch.get_num_threads()} threads, {given.repeats} repeats")
    columns = ("sizes", "requests", "", "median ms", "least ms", "of DFlash's median")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name, sizes in PAIRS.items():
        for reqs in given.requests:
            times = milliseconds(drafts(sizes, HEADS[name], reqs), given.repeats)
            for what, taken in times.items():
                share = median(taken) / median(times[DFLASH])
                cells = f"{median(taken):.3f} | {min(taken):.3f} | {share:.2f}"
                print(f"| {name} | {reqs} | {what} | {cells} |")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
