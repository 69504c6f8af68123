# SPDX-License-Identifier: Apache-2.0
"""What the target computes on its replies: `python -m benchmarks.smollm2.states`.

It is most of a training step otherwise, so it is stored once for every shard of
`benchmarks.smollm2.rollouts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from benchmarks import parser_of
from benchmarks.smollm2.target import fetch, pair_folder
from benchmarks.tiny.model import Target, load_target

SHORTEST = 24  # a reply must have room for blocks
LIKELY = 32  # tokens kept of the target's distributions
CHUNK = 16  # rows of a forward pass


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


def store(target: Target, shards: Path, folder: Path) -> None:
    """Compute the states of every shard of replies that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(shards.glob("*.jsonl")):
        out = folder / f"{path.stem}.pt"
        if out.exists():
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if len(row["reply"]) >= SHORTEST]
        states = states_of(target, rows, greedy=path.stem.endswith("-t0"))
        torch.save(states, out.with_suffix(".part"))
        out.with_suffix(".part").rename(out)
        print(f"states of {path.stem}", flush=True)


@torch.no_grad()
def states_of(target: Target, rows: list[dict], greedy: bool) -> dict[str, Tensor]:
    """ids int32 [T] and features bf16 [T, F*H] of rows laid end to end.

    likely int32 and odds fp16 [T, LIKELY] are the next token's, in replies. "rows" int64 [N, 4] has
    begin, length, first and greedy of each row.
    """
    rows = sorted(rows, key=lambda row: len(row["prompt"]) + len(row["reply"]))
    parts: dict[str, list[Tensor]] = {k: [] for k in ("ids", "features", "likely", "odds")}
    table, begin = [], 0
    device = target.embed_tokens.weight.device
    for at in range(0, len(rows), CHUNK):
        chunk = [torch.tensor(row["prompt"] + row["reply"]) for row in rows[at : at + CHUNK]]
        padded = torch.nn.utils.rnn.pad_sequence(chunk, batch_first=True).to(device)
        hidden, features = target(padded, features=target.feature_layers)
        for i, ids in enumerate(chunk):
            parts["ids"].append(ids.int().to(device))
            parts["features"].append(features[i, : len(ids)].bfloat16())
            first = len(rows[at + i]["prompt"]) - 1
            odds, likely = target.logits(hidden[i, first : len(ids)]).topk(LIKELY)
            front = torch.zeros(first, LIKELY, device=device)
            parts["likely"].append(torch.cat([front.int(), likely.int()]))
            parts["odds"].append(torch.cat([front, odds.float().softmax(-1)]).half())
            table.append((begin, len(ids), first, int(greedy)))
            begin += len(ids)
    return {name: torch.cat(found) for name, found in parts.items()} | {"rows": torch.tensor(table)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(fetch()).requires_grad_(False).bfloat16()
    store(target, pair_folder() / "rollouts", pair_folder() / "states")


if __name__ == "__main__":
    main()
