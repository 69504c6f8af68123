# SPDX-License-Identifier: Apache-2.0
"""Steps of the drafter's training: loss, optimisers, learning rate, checkpoints."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.smollm2.states import FAST_DTYPE
from benchmarks.tiny.drafter import Drafter, Selector
from benchmarks.tiny.model import Target

DECAY = 3.0  # depth at which a position's weight in the loss has fallen to 1/e
SOFT_LABELS = 0.5  # share of the target's distributions in the labels of greedy rows


def draft_steps(
    name: str,
    model: Drafter,
    target: Target,
    batch_of: Callable[[], dict[str, Tensor]],
    args: argparse.Namespace,
) -> None:
    """Train on batches of `States`; `batch_of` draws them by torch's generator."""
    recent: deque[dict[str, float]] = deque(maxlen=50)
    for step, optimisers in _steps(name, model, args):
        torch.manual_seed(step)
        batch = {k: v.to(args.device) for k, v in batch_of().items()}
        with torch.autocast(args.device, FAST_DTYPE, FAST_DTYPE is not torch.float32):
            loss, found = drafter_loss(model, target, batch, args.anchors)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        recent.append({"loss": loss.item(), **{key: one.item() for key, one in found.items()}})
        if (step + 1) % 50 == 0:
            means = (f"{key} {fmean(one[key] for one in recent):.3f}" for key in recent[0])
            print(name, step + 1, *means, flush=True)


def drafter_loss(
    model: Drafter, target: Target, rows: dict[str, Tensor], anchors: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy of random blocks, and how good the guesses are.

    Labels of T=1 rows are the target's distributions, which have less noise than its tokens. A
    token that the drafter cannot draft is no label.

    Returns:
        The loss; of the best guesses the share that is right at mask 1 ("hit"), and the mean number
        of right ones up to the first wrong one ("accepted").
    """
    ids, first = rows["ids"].long(), rows["first"]
    gamma = model.block_size - 1
    with torch.no_grad():
        room = (rows["length"] - gamma - first)[:, None]
        draws = torch.rand(len(first), anchors, device=first.device)
        at = first[:, None] + (draws * room).long()  # [B, A], where blocks start
        spots = at[..., None] + 1 + torch.arange(gamma, device=ids.device)  # [B, A, gamma]
        row = torch.arange(len(ids), device=ids.device)[:, None, None]
        tokens, before = ids[row, spots], ids[row, spots - 1]
        places = model.indices(tokens)
        soft = torch.where(rows["greedy"], SOFT_LABELS, 1.0)[:, None, None]
    states = model(target, rows["features"].float(), ids.gather(1, at), at)
    # The state before a token gives the target's distribution of that token.
    likely = model.indices(rows["likely"][row, spots - 1].long())
    odds = rows["odds"][row, spots - 1].float()
    log_q = model.logits(target, states, before).log_softmax(-1)
    hard = log_q.gather(-1, places.clamp(min=0)[..., None])[..., 0] * (places >= 0)
    picked = log_q.gather(-1, likely.clamp(min=0)) * (likely >= 0)
    loss = -soft * (odds * picked).sum(-1) - (1 - soft) * hard  # [B, A, gamma]
    right = (log_q.detach().argmax(-1) == places).float()
    weight = torch.exp(-torch.arange(gamma, device=ids.device) / DECAY)
    found = {"hit": right[..., 0].mean(), "accepted": right.cumprod(-1).sum(-1).mean()}
    return (loss * weight).sum(-1).mean() / weight.sum(), found


def _optimisers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for norms and the selector."""
    matrices, rest = [], []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            muon = weight.dim() == 2 and Selector.name not in name
            (matrices if muon else rest).append(weight)
    keys = {"lr": lr, "weight_decay": 0.02, "adjust_lr_fn": "match_rms_adamw"}
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **keys)] if matrices else []
    return [*found, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def _steps(
    name: str, model: nn.Module, args: argparse.Namespace
) -> Iterator[tuple[int, list[torch.optim.Optimizer]]]:
    """Yield (step, optimisers) with the learning rate set; resumes from the last checkpoint.

    `args.seconds` ends the run earlier, with the same course of the rate.
    """
    optimisers = _optimisers(model, args.lr)
    seconds, begin = args.seconds or float("inf"), time.monotonic()
    path, step = args.work / f"{name}.ckpt", 0
    if path.exists():
        state = torch.load(path, map_location=args.device)
        step = state["step"]
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, state["opts"], strict=True):
            optimiser.load_state_dict(saved)
    while (done := max(step / args.steps, (time.monotonic() - begin) / seconds)) < 1:
        # Warm up for 40 steps, hold for 40% of the run, then decay linearly to zero.
        factor = min(1.0, (step + 1) / 40, (1 - done) / 0.6)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = args.lr * factor
        yield step, optimisers
        step += 1
        if step % (50 if args.device == "cpu" else 1000) == 0:
            _save(path, step, model, optimisers)
    _save(path, step, model, optimisers)


def _save(path: Path, step: int, model: nn.Module, optimisers: list[Any]) -> None:
    saved = [optimiser.state_dict() for optimiser in optimisers]
    torch.save({"step": step, "model": model.state_dict(), "opts": saved}, path)
