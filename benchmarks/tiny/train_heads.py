# SPDX-License-Identifier: Apache-2.0
"""Train other kinds of drafters from the tiny one: `python -m benchmarks.tiny.train_heads NAME`.

  dflash2   a DFlash2 selector on the drafter's frozen backbone
  dspark    a DSpark Markov head, on the same
  domino    a Domino head, on the same; with --start, backbone and head together
  causal    the drafter's weights as a causal drafter (JetSpec), on the target's distributions

New continuations of the target (`rollouts.py`, fewer than in `train.py`) and the backbone's states
for the heads are stored in the work folder; delete a file to repeat its stage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.tiny.drafter import Drafter, load_drafter, save_drafter
from benchmarks.tiny.heads import Domino, Markov, Selector
from benchmarks.tiny.model import Target, load_target
from benchmarks.tiny.rollouts import make_rollouts
from benchmarks.tiny.train import ANCHORS, HERE, draft_steps, random_blocks, rows_of

RANK, STATE = 96, 192
HEADS = {
    "dflash2": Selector,
    "dspark": Markov,
    "domino": lambda dims, rank: Domino(dims, rank, STATE),
}


def load_rollouts(args: argparse.Namespace, target: Target) -> dict[str, Tensor]:
    """The target's continuations of the starts of its training texts."""
    path = args.work / "rollouts.pt"
    if not path.exists():
        tok = AutoTokenizer.from_pretrained(HERE / "target")
        torch.save(make_rollouts(target, tok, args.rollouts, args.device), path)
    return torch.load(path)


@torch.inference_mode()
def block_states(target: Target, model: Drafter, rolls: dict[str, Tensor]) -> dict[str, Tensor]:
    """The frozen backbone's blocks: at int64 [N, A], states bf16 [N, A, G-1, H]."""
    torch.manual_seed(2)
    at = random_blocks(rolls["first"], ANCHORS, rolls["ids"].shape[1] - (model.block_size - 1))
    states = []
    for rows in torch.arange(len(at)).split(16):
        tokens = rolls["ids"][rows].long().gather(1, at[rows])
        made = model(target, rolls["features"][rows].float(), tokens, at[rows])
        states.append(made.to(torch.bfloat16))
    return {"at": at, "states": torch.cat(states)}


def train_head(args: argparse.Namespace, target: Target, rolls: dict[str, Tensor]) -> Drafter:
    """Train a head alone; the backbone's states are computed once."""
    model = load_drafter(HERE / "drafter", args.device).requires_grad_(False)
    path = args.work / "states.pt"
    if not path.exists():
        torch.save(block_states(target, model, rolls), path)
    rolls = {k: v for k, v in rolls.items() if k != "features"} | torch.load(path)
    torch.manual_seed(3)
    head = HEADS[args.name](model.dims, args.rank)
    model.add_module(head.name, head)
    everything = torch.arange(len(rolls["ids"]))
    draft_steps(args.name, model, target, rows_of(rolls, everything), args.steps, args.lr, args)
    return model


def train_domino(args: argparse.Namespace, target: Target, rolls: dict[str, Tensor]) -> Drafter:
    """Train backbone and head of a Domino drafter further, by Domino's curriculum."""
    model = load_drafter(args.start, args.device)
    for layer in model.layers:
        layer.self_attn.k_norm.requires_grad_(False)  # see `fix_key_norms`
    everything = torch.arange(len(rolls["ids"]))
    draft_steps(
        "all", model, target, rows_of(rolls, everything), args.steps, args.lr, args, True, True
    )
    return model


def train_causal(args: argparse.Namespace, target: Target, rolls: dict[str, Tensor]) -> Drafter:
    """Train the drafter further, with a causal mask and the target's distributions as labels."""
    model = load_drafter(HERE / "drafter", args.device)
    model.causal = True
    for layer in model.layers:
        layer.self_attn.k_norm.requires_grad_(False)  # see `fix_key_norms`
    everything = torch.arange(len(rolls["ids"]))
    draft_steps(
        args.name, model, target, rows_of(rolls, everything), args.steps, args.lr, args, True
    )
    return model


def main() -> None:
    """Train one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=(*HEADS, "causal"))
    parser.add_argument("--out", type=Path, help="folder of the drafter (default: work/NAME)")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="rollouts, checkpoints")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--start", type=Path, help="domino: train all weights of this drafter")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--rollouts", type=int, default=2304, help="continuations of 208 tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    target = load_target(HERE / "target", args.device).requires_grad_(False)
    rolls = load_rollouts(args, target)
    out = args.out or args.work / args.name
    make = train_head if args.name in HEADS else train_causal
    if args.name == "domino" and args.start is not None:
        make = train_domino
    save_drafter(make(args, target, rolls), out, target, eos_id=0)


if __name__ == "__main__":
    main()
