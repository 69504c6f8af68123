# SPDX-License-Identifier: Apache-2.0
"""Replies of the target with what it computed on them: shards on disk, and batches of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHORTEST = 24  # a reply must have room for blocks
LIKELY = 32  # tokens kept of the target's distributions
_STATES = ("features", "likely", "odds")
# Of rollouts and training: PyTorch only emulates bf16 products on a CPU without AVX-512 BF16.
_BF16 = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
FAST_DTYPE = torch.bfloat16 if _BF16 else torch.float32


@dataclass
class Reply:
    """A conversation of T tokens and the target's states on it.

    ids: prompt and reply. first: the position of the prompt's last token. states: "features" bf16
    [T, F*H] of the layers that the drafter reads; "likely" int32 and "odds" fp16 [T, LIKELY], the
    next token's, in replies. Rows that no step computed are zero, as the last one is.
    """

    ids: list[int]
    first: int
    states: dict[str, Tensor]


def replies_of(
    asked: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    steps: Iterable[tuple[Any, dict[str, Tensor]]],
) -> list[Reply]:
    """The rows of an engine's steps, in the places of the replies that they belong to.

    asked: prompt and reply of each request. steps: vLLM's `InputBatch` and the states of each step,
    "features" of all its rows, the others of each request's last row.
    """
    parts: dict[str, list[tuple[slice, dict[str, Tensor]]]] = defaultdict(list)
    for batch, states in steps:
        bounds = batch.query_start_loc_np.tolist()
        for i, name in enumerate(batch.req_ids):
            begin, end, computed = bounds[i], bounds[i + 1], int(batch.num_computed_tokens_np[i])
            rows = {n: v[begin:end] if n == "features" else v[i] for n, v in states.items()}
            where = slice(computed, computed + end - begin)
            parts[name.split("-")[0]].append((where, rows))  # the engine adds a suffix
    found = []
    for name, (prompt, reply) in asked.items():
        ids, computed = [*prompt, *reply], parts.get(name, [])
        states = {}
        if computed:
            kinds = computed[0][1].items()
            states = {n: value.new_zeros(len(ids), value.shape[-1]) for n, value in kinds}
        for where, rows in computed:
            if where.stop < len(ids):  # else it is past the reply's end
                states["features"][where] = rows["features"]
                for kind in _STATES[1:] if where.stop >= len(prompt) else ():
                    states[kind][where.stop - 1] = rows[kind]
        found.append(Reply(ids, len(prompt) - 1, states))
    return found


def pack(replies: Sequence[Reply], greedy: bool) -> dict[str, Tensor]:
    """A shard: ids int32 [T] and the states of replies laid end to end.

    "rows" int64 [N, 4] has begin, length, first and greedy of each.
    """
    kept = [one for one in replies if len(one.ids) - one.first > SHORTEST]
    table, begin = [], 0
    for one in kept:
        table.append((begin, len(one.ids), one.first, int(greedy)))
        begin += len(one.ids)
    states = {kind: torch.cat([one.states[kind] for one in kept]) for kind in _STATES}
    ids = torch.tensor([token for one in kept for token in one.ids], dtype=torch.int32)
    return {"ids": ids, **states, "rows": torch.tensor(table)}


@dataclass(frozen=True)
class Row:
    """A conversation in a shard's states: positions `begin` to `begin + length` of it.

    first: where the first block starts, the last token of the prompt.
    """

    shard: int
    begin: int
    length: int
    first: int
    greedy: bool


class States:
    """Shards' states, of which batches are drawn."""

    def __init__(self) -> None:
        self.shards: list[dict[str, Tensor]] = []
        self.rows: list[Row] = []

    def load(self, folder: Path) -> None:
        """Add every shard that is stored in a folder; its file is mapped into memory."""
        for path in sorted(folder.glob("*.pt")):
            self.add(torch.load(path, mmap=True))

    def add(self, shard: dict[str, Tensor]) -> None:
        for begin, length, first, greedy in shard.pop("rows").tolist():
            self.rows.append(Row(len(self.shards), begin, length, first, bool(greedy)))
        self.shards.append(shard)
        self.rows.sort(key=lambda row: row.length)  # so that a batch has little padding

    def batches(self, size: int) -> Callable[[], dict[str, Tensor]]:
        """Draws `size` rows of about the same length, by torch's generator."""

        def draw() -> dict[str, Tensor]:
            begin = int(torch.randint(len(self.rows) - size + 1, ()))
            return self.batch(self.rows[begin : begin + size])

        return draw

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        longest = max(row.length for row in rows)
        out = {
            name: values.new_zeros(len(rows), longest, *values.shape[1:])
            for name, values in self.shards[0].items()
        }
        for i, row in enumerate(rows):
            for name, values in self.shards[row.shard].items():
                out[name][i, : row.length] = values[row.begin : row.begin + row.length]
        return out | {
            "length": torch.tensor([row.length for row in rows]),
            "first": torch.tensor([row.first for row in rows]),
            "greedy": torch.tensor([row.greedy for row in rows]),
        }
