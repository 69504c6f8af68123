# SPDX-License-Identifier: Apache-2.0
"""Train the drafter on the target's replies: `python -m benchmarks.smollm2.train`.

It begins with this repository's drafter, reads what `benchmarks.smollm2.rollouts` has stored, and
writes checkpoints to the pair's folder. An interrupted run goes on from the last one, also with
other data or more steps. `--export` writes the checkpoint's drafter. `--selector` trains a DFlash2
selector on the exported drafter, whose weights stay; it drafts the whole vocabulary, because vLLM's
DFlash2 reads no `d2t`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from benchmarks import parser_of
from benchmarks.smollm2.install import OURS, write_compact
from benchmarks.smollm2.states import FAST_DTYPE, States
from benchmarks.smollm2.steps import draft_steps
from benchmarks.smollm2.target import fetch, pair_folder
from benchmarks.tiny.drafter import Drafter, Selector, load_drafter, save_drafter
from benchmarks.tiny.model import load_target

WORDS = 8192  # tokens that can be drafted
NAME = "drafter"


def vocabulary(states: States, size: int, tokens: int) -> Tensor:
    """Ascending ids of the `size` ones of all `tokens` that replies have most often.

    The head's rows are the target's, so a checkpoint goes on with another choice.
    """
    counts = torch.zeros(tokens, dtype=torch.long)
    for row in states.rows:
        ids = states.shards[row.shard]["ids"][row.begin : row.begin + row.length]
        counts += ids[row.first + 1 :].bincount(minlength=tokens)
    chosen = counts.topk(size).indices.sort().values
    covered = counts[chosen].sum() / counts.sum()
    print(f"{size} of {int((counts > 0).sum())} tokens are {covered:.2%} of the text", flush=True)
    return chosen


def to_train(drafter: Path, words: Tensor) -> Drafter:
    """The drafter of a folder that drafts `words`, whose key norms stay 1.

    vLLM 0.32's CPU kernel applies the first layer's key norm to the context of every layer.
    """
    model = load_drafter(drafter)
    model.vocabulary = words
    for layer in model.layers:
        layer.self_attn.k_norm.requires_grad_(False)
    return model


def with_selector(drafter: Path, known: Path) -> Drafter:
    """A folder's drafter, frozen and with the whole vocabulary, and the selector of another's."""
    model = load_drafter(drafter).requires_grad_(False)
    model.vocabulary = None
    model.add_module(Selector.name, load_drafter(known).head)
    return model


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, help="end earlier, with the whole course of rates")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rows", type=int, default=16, help="replies of a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks of a reply")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--selector", action="store_true", help="a DFlash2 selector alone")
    parser.add_argument("--export", action="store_true", help="only write the checkpoint's drafter")
    parser.add_argument("--publish", action="store_true", help="write it to this repository too")
    args = parser.parse_args()
    folder, source = pair_folder(), fetch()
    args.work = folder / "training"
    args.work.mkdir(parents=True, exist_ok=True)
    target = load_target(source, args.device).requires_grad_(False).to(FAST_DTYPE)
    states = States()
    states.load(folder / "states")
    print(f"{len(states.rows)} replies", flush=True)
    name = "dflash2" if args.selector else NAME
    if args.selector:
        model = with_selector(args.work / NAME, folder / name)
    else:
        model = to_train(folder / NAME, vocabulary(states, WORDS, target.dims.vocab_size))
    model.to(args.device)
    if args.export:
        state = torch.load(args.work / f"{name}.ckpt", map_location=args.device)
        model.load_state_dict(state["model"])
    else:
        draft_steps(name, model, target, states.batches(args.rows), args)
    eos = json.loads((source / "config.json").read_text())["eos_token_id"]
    save_drafter(model, args.work / name, target, eos)
    if args.publish:
        write_compact(args.work / name, OURS.with_name(name), OURS if args.selector else None)


if __name__ == "__main__":
    main()
