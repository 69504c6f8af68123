# SPDX-License-Identifier: Apache-2.0
"""Train the tiny target and its DFlash drafter from scratch: `python -m benchmarks.tiny.train`.

Stages; each is skipped if its result is in the work folder (delete a file to repeat it):
  data      tokenizer, token streams, prompts.jsonl
  target    next-token training                          -> target/
  rollouts  the target continues training text, greedily and at T=1
  drafter   block drafting on those continuations
  settle    the same with plain key norms
  code      more steps on code, the hardest domain; the weights move 0.6 of the way -> drafter/
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# Threads sleep while they wait: on a shared machine, a spinning thread takes the core it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.tiny import data
from benchmarks.tiny.drafter import (
    DRAFTER_LAYERS,
    Drafter,
    fix_key_norms,
    save_drafter,
)
from benchmarks.tiny.loop import Log, apply_gradients, steps
from benchmarks.tiny.model import Dims, Target, load_target, save_target
from benchmarks.tiny.rollouts import make_rollouts

HERE = Path(__file__).resolve().parent
DOCUMENTS = 5000  # generated training documents per domain
ANCHORS = 14  # blocks of a row in a step of the drafter's training


def make_data(args: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, dict[str, Tensor]]:
    """Tokenizer, streams and prompts.jsonl."""
    path, folder = args.work / "streams.pt", args.out / "target"
    if path.exists():
        return AutoTokenizer.from_pretrained(folder), torch.load(path)
    texts = {d: data.generate_texts(d, DOCUMENTS) for d in data.DOMAINS}
    texts["stdlib"] = list(data.stdlib_modules(data.TRAIN_MODULES).values())
    sample = [t for name in texts for t in texts[name][:700]]
    tok = data.train_tokenizer(sample, folder)
    rows = data.held_out_prompts(tok, [t for items in texts.values() for t in items])
    (args.out / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    streams = {name: data.encode(tok, items) for name, items in texts.items()}
    print({name: len(s) for name, s in streams.items()}, flush=True)
    torch.save(streams, path)
    return tok, streams


def train_target(args: argparse.Namespace, streams: dict[str, Tensor], eos_id: int) -> None:
    """Next-token prediction on the mixed streams."""
    torch.manual_seed(0)
    model = Target(Dims()).to(args.device)
    corpus = data.Corpus(streams)
    log = Log(args.work / "target.jsonl")
    for step, opts in steps("target", model, args.target_steps, 4e-3, args):
        generator = torch.Generator().manual_seed(step)
        batch = corpus.batch(12, 384, generator).to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            logits = model.logits(model(batch[:, :-1])[0])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        apply_gradients(model, opts)
        log(step, loss=loss.item())
    save_target(model, args.out / "target", eos_id)


def drafter_loss(
    model: Drafter,
    target: Target,
    rolls: dict[str, Tensor],
    anchors: int,
    soft_labels: float = 0.0,
    base: float = 0.0,
    decay: float = 7.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy of random blocks, and how good the guesses are.

    soft_labels: share of the target's distributions in the labels of greedy rows.
    base: share of the loss that the logits without the head's correction have.
    decay: the depth at which the weight has fallen to 1/e.

    rolls: a batch of `make_rollouts`; with "states", those of the blocks at "at" (see `heads.py`);
    with "length" [B], rows that end earlier than others; with "likely" and "odds" [B, L, K], only
    the likeliest tokens of the target's distributions, and no "hidden".
    The labels of greedy rows are tokens. The labels of T=1 rows are the target's own distributions,
    which have less noise. A token that the drafter cannot draft is no label.

    Returns the loss, and of the best guesses the share that is right at mask 1 ("hit") and the mean
    number of right ones up to the first wrong one ("accepted").
    """
    ids, greedy, first = rolls["ids"].long(), rolls["greedy"], rolls["first"]
    batch = len(ids)
    length = rolls.get("length", ids.shape[1])
    gamma = model.block_size - 1
    with torch.no_grad():
        if "states" in rolls:
            at = rolls["at"]
        else:
            at = random_blocks(first, anchors, length - gamma)
        spots = at[..., None] + 1 + torch.arange(gamma, device=ids.device)  # [B, A, gamma]
        row = torch.arange(batch, device=ids.device)[:, None, None]
        tokens, before = ids[row, spots], ids[row, spots - 1]
        places = model.indices(tokens)
        share = torch.where(greedy, soft_labels, 1.0)[:, None, None]  # of soft labels
    if "states" in rolls:
        states = rolls["states"].float()
    else:
        states = model(target, rolls["features"].float(), ids.gather(1, at), at)
    # The state before a token gives the target's distribution of that token.
    if "likely" in rolls:
        likely = model.indices(rolls["likely"][row, spots - 1].long())
        odds = rolls["odds"][row, spots - 1].float()
    else:
        hidden = rolls["hidden"][row, spots - 1].float()
        likely, odds = None, model.plain_logits(target, hidden).float().softmax(-1)
    log_q = model.logits(target, states, before).log_softmax(-1)
    loss = cross_entropy(log_q, likely, odds, places, share)  # [B, A, gamma]
    if base:
        plain = model.plain_logits(target, states).float().log_softmax(-1)
        loss = (1 - base) * loss + base * cross_entropy(plain, likely, odds, places, share)
    best = log_q.detach().argmax(-1)
    weight = torch.exp(-torch.arange(gamma, device=ids.device) / decay)
    right = (best == places).float()
    found = {"hit": right[..., 0].mean(), "accepted": right.cumprod(-1).sum(-1).mean()}
    return (loss * weight).sum(-1).mean() / weight.sum(), found


def cross_entropy(
    log_q: Tensor, likely: Tensor | None, odds: Tensor, places: Tensor, share: Tensor
) -> Tensor:
    """Of log_q [..., V] against `share` of the distributions and 1 - share of the tokens.

    likely: the places [..., K] that `odds` [..., K] belong to, -1 for none; None: all of them.
    """
    hard = log_q.gather(-1, places.clamp(min=0)[..., None])[..., 0] * (places >= 0)
    picked = log_q if likely is None else log_q.gather(-1, likely.clamp(min=0)) * (likely >= 0)
    return -share * (odds * picked).sum(-1) - (1 - share) * hard


def random_blocks(first: Tensor, anchors: int, end: int | Tensor) -> Tensor:
    """[B, anchors] positions where blocks start: from `first` [B] on, before `end`."""
    room = (end - first)[:, None]
    return first[:, None] + (torch.rand(len(first), anchors, device=first.device) * room).long()


def draft_steps(
    name: str,
    model: Drafter,
    target: Target,
    batch_of: Callable[[], dict[str, Tensor]],
    total: int,
    lr: float,
    args: argparse.Namespace,
    soft_labels: float = 0.0,
    curriculum: bool = False,
    anchors: int = ANCHORS,
    decay: float = 7.0,
) -> None:
    """Train on batches of `make_rollouts`' rows; `batch_of` draws them by torch's generator.

    curriculum: Domino's; the loss is the uncorrected logits' at first and shifts linearly to the
        corrected ones' over the first half of the steps.
    """
    log = Log(args.work / f"{name}.jsonl")
    for step, opts in steps(name, model, total, lr, args):
        torch.manual_seed(step)
        batch = {k: v.to(args.device) for k, v in batch_of().items()}
        with torch.autocast(args.device, torch.bfloat16):
            base = max(0.0, 1 - 2 * step / total) if curriculum else 0.0
            loss, found = drafter_loss(model, target, batch, anchors, soft_labels, base, decay)
        loss.backward()
        apply_gradients(model, opts)
        log(step, loss=loss.item(), **{name: value.item() for name, value in found.items()})


def rows_of(rolls: dict[str, Tensor], pool: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Draws 24 of the rows `pool` (indices into rolls)."""

    def batch_of() -> dict[str, Tensor]:
        rows = pool[torch.randint(len(pool), (24,))]
        return {k: v[rows] for k, v in rolls.items()}

    return batch_of


def train_drafter(args: argparse.Namespace, eos_id: int, mask_id: int) -> None:
    """Block drafting on the target's continuations; the target is frozen (its bf16 weights)."""
    target = load_target(args.out / "target", args.device).requires_grad_(False)
    rolls = torch.load(args.work / "rollouts.pt")
    torch.manual_seed(1)
    model = Drafter(replace(target.dims, num_hidden_layers=DRAFTER_LAYERS), mask_id)
    model.norm.weight.data.copy_(target.norm.weight)  # which the shared head expects
    model.to(args.device)
    everything = torch.arange(len(rolls["ids"]))
    draft_steps(
        "drafter", model, target, rows_of(rolls, everything), args.drafter_steps, 4e-3, args
    )
    # Then with fixed key norms, and without chat, which is meant to be hard to guess.
    fix_key_norms(model)
    others = everything[~rolls["chat"]]
    draft_steps("settle", model, target, rows_of(rolls, others), args.settle_steps, 2e-3, args)
    settled = {name: value.clone() for name, value in model.state_dict().items()}
    code = everything[rolls["code"]]
    draft_steps("code", model, target, rows_of(rolls, code), args.code_steps, 2e-3, args)
    # Training on code alone forgets the rest; interpolated weights keep most of both.
    trained = model.state_dict()
    model.load_state_dict(
        {
            n: torch.lerp(settled[n].float(), trained[n].float(), 0.6).to(v.dtype)
            for n, v in settled.items()
        }
    )
    save_drafter(model, args.out / "drafter", target, eos_id)


def main() -> None:
    """Run the stages without a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "work", help="folder of the pair")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="streams and checkpoints")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target-steps", type=int, default=1000)
    parser.add_argument("--drafter-steps", type=int, default=1000)
    parser.add_argument("--settle-steps", type=int, default=300)
    parser.add_argument("--code-steps", type=int, default=350)
    parser.add_argument("--rollouts", type=int, default=5120, help="continuations of 208 tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    tok, streams = make_data(args)
    mask_id = tok.convert_tokens_to_ids(data.MASK)
    if not (args.out / "target" / "model.safetensors").exists():
        train_target(args, streams, tok.eos_token_id)
    if not (args.work / "rollouts.pt").exists():
        target = load_target(args.out / "target", args.device)
        torch.save(
            make_rollouts(target, tok, args.rollouts, args.device), args.work / "rollouts.pt"
        )
    if not (args.out / "drafter" / "model.safetensors").exists():
        train_drafter(args, tok.eos_token_id, mask_id)


if __name__ == "__main__":
    main()
