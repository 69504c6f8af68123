# SPDX-License-Identifier: Apache-2.0
"""Record what a drafter drafts at every position of the target's greedy replies, and print tau.

    python -m benchmarks.smollm2.record --data humaneval=FILE gsm8k=FILE --out recording.npz

A step of any policy can be looked up in the recording (`benchmarks.replay.recording`), because
decoding is lossless and a draft depends on the prefix alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import parser_of
from benchmarks.chat import Renderer
from benchmarks.e2e.data import load_set
from benchmarks.prompts import Prompt, load_jsonl
from benchmarks.provenance import command_line, provenance
from benchmarks.replay.recording import FORMAT, Recording, load_recording
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.trees import target_ranks
from benchmarks.smollm2.rollouts import PROMPT, Engine
from benchmarks.smollm2.states import Reply
from benchmarks.smollm2.target import fetch, pair_folder
from benchmarks.tiny.drafter import Drafter, load_drafter
from benchmarks.tiny.model import Target, load_target

BUDGETS = (8, 16, 32, 64)
TOP_K = 16


@torch.inference_mode()
def drafts(target: Target, drafter: Drafter, reply: Reply) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities [M, D, TOP_K] of the blocks after every emitted token."""
    depth = drafter.block_size - 1
    at = torch.arange(reply.first + 1, len(reply.ids) - depth - 1)[None]
    roots = torch.tensor(reply.ids)[at]
    features = reply.states["features"][None].float()
    states = drafter(target, features, roots, at)
    scores = drafter.logits(target, states, roots)[0].log_softmax(-1)
    best, places = scores.topk(TOP_K)
    tokens = places if drafter.vocabulary is None else drafter.vocabulary[places]
    return tokens.numpy(), best.numpy()


def record(target: Target, drafter: Drafter, many: Sequence[tuple[Prompt, Reply]]) -> dict:
    """The arrays of a recording, without its note of provenance."""
    many = [one for one in many if len(one[1].ids) - one[1].first > drafter.block_size + 2]
    found = [drafts(target, drafter, reply) for _, reply in many]
    sizes = [len(tokens) for tokens, _ in found]
    prompts = [reply.ids[: reply.first + 1] for _, reply in many]
    replies = [reply.ids[reply.first + 1 :] for _, reply in many]
    positions = np.concatenate([np.arange(1, size + 1) for size in sizes])
    return {
        "version": FORMAT,
        "request_ids": [prompt.id for prompt, _ in many],
        "domains": [prompt.set for prompt, _ in many],
        "temperatures": np.zeros(len(many), np.float32),
        "prompt_lens": np.array([*map(len, prompts)], np.int32),
        "prompts": np.concatenate(prompts).astype(np.int32),
        "token_offsets": np.cumsum([0, *map(len, replies)]),
        "tokens": np.concatenate(replies).astype(np.int32),
        "step_requests": np.repeat(np.arange(len(many)), sizes).astype(np.int32),
        "step_positions": positions.astype(np.int32),
        "topk_tokens": np.concatenate([tokens for tokens, _ in found]).astype(np.uint16),
        "topk_logprobs": np.concatenate([logprobs for _, logprobs in found]).astype(np.float16),
    }


def taus(recording: Recording) -> Iterator[tuple[str, list[float]]]:
    """Of each domain tau of the chain, then of fixed trees of BUDGETS nodes."""
    corpus = Corpus(recording, max(BUDGETS))
    right = (target_ranks(recording) == 0).cumprod(1).sum(1)
    trees = (lambda step, n=n: corpus.tree(step).accepted(n) for n in BUDGETS)
    policies: list[Callable[[int], int]] = [right.tolist().__getitem__, *trees]
    for domain, requests in corpus.domains.items():
        found = []
        for accepted in policies:
            steps = emitted = 0
            for request in requests:
                at = 1
                while at <= request.last:
                    at += 1 + accepted(request.first_step + at - 1)
                    steps += 1
                emitted += at - 1
            found.append(emitted / steps)
        yield domain, found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", nargs="+", default=[], metavar="SET=FILE")
    parser.add_argument("--jsonl", nargs="+", type=Path, default=[], help="own prompts, Spec-Bench")
    parser.add_argument("--samples", type=int, default=24, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=256, help="of a reply")
    parser.add_argument("--drafters", nargs="+", type=Path, default=[pair_folder() / "drafter"])
    parser.add_argument("--out", type=Path, help="the recording of the last drafter")
    args = parser.parse_args()
    pairs = (pair.partition("=") for pair in args.data)
    prompts = [one for n, _, f in pairs for one in load_set(n, args.samples, local=Path(f))]
    prompts += [one for file in args.jsonl for one in load_jsonl(file, args.samples)]
    engine = Engine(fetch(), seed=0)
    render = Renderer(engine.llm.get_tokenizer(), raw=False, limit=PROMPT)
    replies = engine([render.ids(one, []) for one in prompts], 0.0, args.tokens)
    target = load_target(fetch()).requires_grad_(False)
    meta = json.dumps(provenance(command_line("benchmarks.smollm2.record", sys.argv[1:])))
    for folder in args.drafters:
        arrays = record(target, load_drafter(folder), list(zip(prompts, replies, strict=True)))
        out = args.out or pair_folder() / "recording.npz"
        np.savez_compressed(out, meta=meta, **arrays)
        for domain, found in taus(load_recording(out)):
            print(folder.name, domain, *(f"{tau:.3f}" for tau in found))


if __name__ == "__main__":
    main()
