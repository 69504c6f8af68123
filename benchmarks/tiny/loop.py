# SPDX-License-Identifier: Apache-2.0
"""Steps of a training run: optimisers, learning rate, checkpoints, a log."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.tiny.heads import Domino, Markov, Selector

_BY_ADAM = ("embed", "lm_head", Selector.name, Markov.name, f"{Domino.name}.")


def optimisers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, norms and heads."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    of_layers = [p.dim() == 2 and not any(part in n for part in _BY_ADAM) for n, p in named]
    matrices = [p for (_, p), muon in zip(named, of_layers, strict=True) if muon]
    rest = [p for (_, p), muon in zip(named, of_layers, strict=True) if not muon]
    out: list[torch.optim.Optimizer] = []
    if matrices:
        out.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        )
    return [*out, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def steps(
    name: str, model: nn.Module, total: int, lr: float, args: argparse.Namespace
) -> Iterator[tuple[int, list[torch.optim.Optimizer]]]:
    """Yield (step, optimisers) with the learning rate set; resumes from the last checkpoint.

    `args.seconds`, if there is one, ends the run earlier, with the same course of the rate.
    """
    opts = optimisers(model, lr)
    seconds, begin = getattr(args, "seconds", None) or float("inf"), time.monotonic()
    path = args.work / f"{name}.ckpt"
    first = 0
    if path.exists():
        state = torch.load(path, map_location=args.device)
        first = state["step"]
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(saved)
    for step in range(first, total):
        done = max(step / total, (time.monotonic() - begin) / seconds)
        if done >= 1:
            break
        # Warm up for 40 steps, hold for 40% of the run, then decay linearly to zero.
        factor = min(1.0, (step + 1) / 40, (1 - done) / 0.6)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr * factor
        yield step, opts
        if (step + 1) % (50 if args.device == "cpu" else 1000) == 0:
            saved = [o.state_dict() for o in opts]
            torch.save({"step": step + 1, "model": model.state_dict(), "opts": saved}, path)


def apply_gradients(model: nn.Module, opts: list[torch.optim.Optimizer]) -> None:
    """Clip, step and clear."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)


class Log:
    """Running mean of a loss, printed every 50 steps and logged to the work folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.values, self.start = path, [], time.time()

    def __call__(self, step: int, **values: float) -> None:
        self.values.append(values)
        if (step + 1) % 50 == 0:
            last = self.values[-50:]
            mean = {k: round(sum(v[k] for v in last) / len(last), 4) for k in values}
            line = json.dumps(
                {"step": step + 1, "seconds": round(time.time() - self.start), **mean}
            )
            print(self.path.stem, line, flush=True)
            with self.path.open("a") as f:
                f.write(line + "\n")
