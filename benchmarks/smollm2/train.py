# SPDX-License-Identifier: Apache-2.0
"""Train the drafter on the target's replies: `python -m benchmarks.smollm2.train`.

It reads what `benchmarks.smollm2.states` has stored, and writes checkpoints and a log to the pair's
folder. An interrupted run goes on from the last checkpoint, also with other data or more steps.
`--export` writes the checkpoint's drafter. `--selector` trains a DFlash2 selector on the exported
drafter, whose weights stay; it drafts the whole vocabulary, because vLLM's DFlash2 reads no `d2t`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from benchmarks import parser_of
from benchmarks.smollm2.install import OURS, write_compact
from benchmarks.smollm2.states import States
from benchmarks.smollm2.steps import draft_steps
from benchmarks.smollm2.target import fetch, pair_folder
from benchmarks.tiny.drafter import Drafter, Selector, load_drafter, save_drafter
from benchmarks.tiny.model import Dims, load_target

MASK = "<reponame>"  # which no chat contains
WORDS = 8192  # tokens that can be drafted
BLOCK = 8  # chains and trees deeper than 7 would pay seldom with replies this hard to guess
LAYERS, FEED_FORWARD = 3, 1024
RANK = 64  # of the selector
NAME = "drafter"


def vocabulary(shards: Path, size: int) -> Tensor:
    """Ascending ids of the tokens that conversations have most often.

    The head's rows are the target's, so a checkpoint goes on with another choice.
    """
    counts: Counter[int] = Counter()
    for shard in sorted(shards.glob("*.jsonl")):
        for line in shard.read_text().splitlines():
            row = json.loads(line)
            counts.update(row["prompt"] + row["reply"])
    chosen = sorted(token for token, _ in counts.most_common(size))
    covered = sum(counts[token] for token in chosen) / counts.total()
    print(f"{len(chosen)} of {len(counts)} tokens are {covered:.2%} of the text", flush=True)
    return torch.tensor(chosen)


def new_drafter(target: torch.nn.Module, words: Tensor, mask_id: int) -> Drafter:
    """An untrained drafter, whose key norms stay 1.

    vLLM 0.32's CPU kernel applies the first layer's key norm to the context of every layer.
    """
    torch.manual_seed(1)
    sizes = {k: getattr(target.dims, k) for k in Dims.__dataclass_fields__}
    sizes |= {"num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD}
    model = Drafter(Dims(**sizes), mask_id, vocabulary=words, block_size=BLOCK)
    model.norm.weight.data.copy_(target.norm.weight)  # which the shared head expects
    for layer in model.layers:
        layer.self_attn.k_norm.requires_grad_(False)
    return model


def with_selector(drafter: Path) -> Drafter:
    """The drafter of a folder, frozen and with the whole vocabulary, and a new selector on it."""
    model = load_drafter(drafter).requires_grad_(False)
    model.vocabulary = None
    torch.manual_seed(3)
    model.add_module(Selector.name, Selector(model.dims, RANK))
    return model


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, help="end earlier, with the whole course of rates")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rows", type=int, default=16, help="replies of a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks of a reply")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--selector", action="store_true", help="a DFlash2 selector alone")
    parser.add_argument("--export", action="store_true", help="only write the checkpoint's drafter")
    parser.add_argument("--publish", action="store_true", help="write it to this repository too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, source = pair_folder(), fetch()
    args.work = folder / "training"
    args.work.mkdir(parents=True, exist_ok=True)
    target = load_target(source, args.device).requires_grad_(False).bfloat16()
    name = "dflash2" if args.selector else NAME
    if args.selector:
        model = with_selector(args.work / NAME)
    else:
        tokens = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
        mask = next(token["id"] for token in tokens if token["content"] == MASK)
        model = new_drafter(target, vocabulary(folder / "rollouts", WORDS), mask)
    model.to(args.device)
    if args.export:
        state = torch.load(args.work / f"{name}.ckpt", map_location=args.device)
        model.load_state_dict(state["model"])
    else:
        states = States()
        states.load(folder / "states")
        print(f"{len(states.rows)} replies", flush=True)
        draft_steps(name, model, target, states.batches(args.rows), args)
    eos = json.loads((source / "config.json").read_text())["eos_token_id"]
    save_drafter(model, args.work / name, target, eos)
    if args.publish:
        write_compact(args.work / name, OURS.with_name(name), OURS if args.selector else None)


if __name__ == "__main__":
    main()
