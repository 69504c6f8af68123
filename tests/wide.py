# SPDX-License-Identifier: Apache-2.0
"""Whether a wide pair computes the tiny one's function, with the models of `benchmarks.tiny`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from benchmarks.tiny.drafter import Drafter
from benchmarks.tiny.heads import Domino, Selector
from benchmarks.tiny.model import Dims, Target
from benchmarks.widen.checkpoint import read_config

_DIMS = tuple(field.name for field in fields(Dims))


class Stored:
    """A checkpoint read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._file = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._file)

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load a module's weights, in its own dtype."""
        module.load_state_dict({name: self[prefix + name] for name in module.state_dict()})


def open_pair(folder: Path, kind: str = "drafter") -> tuple[Target, Drafter, Tensor]:
    """A pair in float32, and the head's bf16 weights [V, H]; `kind` is the drafter's folder."""
    stored, drafted = Stored(folder / "target"), Stored(folder / kind)
    own, theirs = (read_config(folder / name) for name in ("target", kind))
    dims, drafter_dims = (Dims(**{n: c[n] for n in _DIMS}) for c in (own, theirs))
    target = Target(dims)
    stored.fill(target, "model.")
    settings: dict[str, Any] = theirs["dflash_config"]
    drafter = Drafter(drafter_dims, settings["mask_token_id"])
    fc = drafted["fc.weight"]
    drafter.fc = nn.Linear(fc.shape[1], fc.shape[0], bias=False)
    drafted.fill(drafter, "")
    if "emb_dim" in settings:
        drafter.domino = Domino(drafter_dims, settings["emb_dim"], settings["gru_hidden_dim"])
        drafted.fill(drafter.domino, "")
    elif "selector_rank" in settings:
        drafter.candidate_selector = Selector(drafter_dims, settings["selector_rank"])
        drafted.fill(drafter.candidate_selector, f"{Selector.name}.")
    head = "lm_head.weight" if "lm_head.weight" in stored.names() else "model.embed_tokens.weight"
    return target.eval(), drafter.eval(), stored[head]


@dataclass(frozen=True)
class Distance:
    """Logits of the wide model against the tiny one's, over positions of held-out text."""

    positions: int
    equal_argmax: int
    largest_difference: float
    largest_logit: float
    # From the smallest of the best logits down to the largest padded one; None without padding.
    gap: float | None


def distance(truth: Tensor, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Distance:
    """truth [..., v] logits; hidden [..., H] and head [V, H] of the wide model, V >= v.

    bias: [..., V], added to its logits.
    """
    vocab = truth.shape[-1]
    logits = F.linear(hidden, head[:vocab].float())
    if bias is not None:
        logits += bias[..., :vocab]
    gap = None
    if len(head) > vocab:
        # All padded rows are equal.
        padded = F.linear(hidden, head[vocab : vocab + 1].float())
        if bias is not None:
            padded += bias[..., vocab:].amax(-1, keepdim=True)
        gap = float((logits.max(-1).values - padded[..., 0]).min())
    return Distance(
        positions=truth[..., 0].numel(),
        equal_argmax=int((truth.argmax(-1) == logits.argmax(-1)).sum()),
        largest_difference=float((truth - logits).abs().max()),
        largest_logit=float(truth.abs().max()),
        gap=gap,
    )


@torch.inference_mode()
def check(
    tiny: tuple[Target, Drafter],
    folder: Path,
    ids: Tensor,
    tiny_features: tuple[int, ...],
    kind: str = "drafter",
) -> dict[str, Distance]:
    """Compare a written pair with the tiny one it was made from.

    The target is compared at every position, the drafter on the blocks that start at the last and
    at the middle position. A head that corrects its logits sees the best uncorrected tokens.

    Args:
        ids: [B, T] held-out text.
        kind: the drafter's folder.
    """
    small, small_drafter = tiny
    wide, wide_drafter, head = open_pair(folder, kind)
    wide_features = tuple(read_config(folder / kind)["dflash_config"]["target_layer_ids"])
    states, features = small(ids, features=tiny_features)
    wide_states, read = wide(ids, features=wide_features)
    last = ids.shape[1] - 1
    anchors = torch.tensor([[last // 2, last]]).expand(len(ids), -1)
    tokens = ids.gather(1, anchors)
    block = small_drafter(small, features, tokens, anchors)
    wide_block = wide_drafter(wide, read, tokens, anchors)
    best = small.logits(block).argmax(-1)
    before = torch.cat([tokens[..., None], best[..., :-1]], dim=-1)
    return {
        "target": distance(small.logits(states), wide_states, head),
        kind: distance(
            small_drafter.logits(small, block, before),
            wide_block,
            head,
            bias_of(wide_drafter, wide, before, wide_block),
        ),
    }


def bias_of(drafter: Drafter, target: Target, before: Tensor, states: Tensor) -> Tensor | None:
    """[..., V] what the drafter's head adds to the logits, or None without a head."""
    if drafter.head is None:
        return None
    if isinstance(drafter.head, Domino):
        return drafter.head.bias(before, states, target.embed_tokens)
    return drafter.head.bias(before, states)
