# SPDX-License-Identifier: Apache-2.0
"""Train the tiny target and its DFlash drafter from scratch: `python benchmarks/tiny/train.py`.

With `--hybrid`, train the hybrid pair with the tiny pair's tokenizer and a shorter recipe (README).

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
from typing import Any

# Threads sleep while they wait: on a shared machine, a spinning thread takes the core it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import data
import torch
import torch.nn.functional as F
from checkpoints import AnyTarget, load_target, save_target
from drafter import (
    DRAFTER_LAYERS,
    Drafter,
    fix_key_norms,
    save_drafter,
)
from hybrid import HybridTarget
from loop import Log, apply_gradients, steps
from model import Dims, Target
from rollouts import make_rollouts
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
    if args.hybrid:
        tok = AutoTokenizer.from_pretrained(HERE / "target")
        tok.save_pretrained(folder)
    else:
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
    model = (HybridTarget() if args.hybrid else Target(Dims())).to(args.device)
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
    target: AnyTarget,
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
        odds = share[..., None] * rolls["odds"][row, spots - 1].float()
        labels = torch.cat([likely, places[..., None]], -1)
        odds = torch.cat([odds, (1 - share).expand(places.shape)[..., None]], -1) * (labels >= 0)
        rows = model.head_rows(target)
        loss, best = FewLabels.apply(states, rows, labels.clamp(min=0), odds)
    else:
        hidden = rolls["hidden"][row, spots - 1].float()
        soft = model.plain_logits(target, hidden).float().softmax(-1)
        log_q = model.logits(target, states, before).log_softmax(-1)
        loss = cross_entropy(log_q, soft, places, share)  # [B, A, gamma]
        if base:
            plain = model.plain_logits(target, states).float().log_softmax(-1)
            loss = (1 - base) * loss + base * cross_entropy(plain, soft, places, share)
        best = log_q.detach().argmax(-1)
    weight = torch.exp(-torch.arange(gamma, device=ids.device) / decay)
    right = (best == places).float()
    found = {"hit": right[..., 0].mean(), "accepted": right.cumprod(-1).sum(-1).mean()}
    return (loss * weight).sum(-1).mean() / weight.sum(), found


def cross_entropy(log_q: Tensor, soft: Tensor, places: Tensor, share: Tensor) -> Tensor:
    """Of log_q [..., V] against `share` of the distributions `soft` and 1 - share of the tokens."""
    hard = log_q.gather(-1, places.clamp(min=0)[..., None])[..., 0] * (places >= 0)
    return -share * (soft * log_q).sum(-1) - (1 - share) * hard


class FewLabels(torch.autograd.Function):
    """Cross-entropy through a frozen head, with a few weighted labels for each state.

    A large head's logits do not fit into a CPU's caches. So the loss and the gradient of a chunk
    are computed together, and its logits are dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, labels: Tensor, odds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """states [..., H], rows [V, H], labels and odds [..., K] -> losses, best tokens [...]."""
        shape, flat = labels.shape[:-1], states.detach().flatten(0, -2).to(rows.dtype)
        losses, best, gradients = [], [], []
        parts = (t.split(256) for t in (flat, labels.flatten(0, -2), odds.flatten(0, -2)))
        for some, wanted, weight in zip(*parts, strict=True):
            logits = (some @ rows.T).float()
            best.append(logits.argmax(-1))
            picked = (weight * logits.gather(-1, wanted)).sum(-1)
            total, whole = weight.sum(-1), logits.logsumexp(-1)
            losses.append(total * whole - picked)
            slope = logits.sub_(whole[:, None]).exp_().mul_(total[:, None])
            slope.scatter_add_(-1, wanted, -weight)
            gradients.append(slope.to(rows.dtype) @ rows)
        ctx.save_for_backward(torch.cat(gradients))
        best_of_all = torch.cat(best).view(shape)
        ctx.mark_non_differentiable(best_of_all)
        return torch.cat(losses).view(shape), best_of_all

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the states."""
        (gradients,) = ctx.saved_tensors
        inner = gradients.view(*outer.shape, -1)
        return outer[..., None] * inner.float(), None, None, None


def random_blocks(first: Tensor, anchors: int, end: int | Tensor) -> Tensor:
    """[B, anchors] positions where blocks start: from `first` [B] on, before `end`."""
    room = (end - first)[:, None]
    return first[:, None] + (torch.rand(len(first), anchors, device=first.device) * room).long()


def draft_steps(
    name: str,
    model: Drafter,
    target: AnyTarget,
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
    model.norm.weight.data.copy_(target.final_scale)  # which the shared head expects
    model.to(args.device)
    everything = torch.arange(len(rolls["ids"]))
    if args.hybrid:
        fix_key_norms(model)  # from the start, for one stage
    draft_steps(
        "drafter", model, target, rows_of(rolls, everything), args.drafter_steps, 4e-3, args
    )
    if args.hybrid:
        save_drafter(model, args.out / "drafter", target, eos_id)
        return
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
    parser.add_argument("--hybrid", action="store_true", help="Qwen3-Next instead of Qwen3")
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
