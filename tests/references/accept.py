# SPDX-License-Identifier: Apache-2.0
"""The walk, what it counts, and the rows that move along its path."""

from __future__ import annotations

from itertools import takewhile

import torch

from bastion_kernels.accept.gather import GatherRows
from bastion_kernels.accept.kv_compact import CompactCaches
from bastion_kernels.accept.walk import AcceptPath
from tests.references.declare import of
from tests.references.kv_layout import packed, unpacked


@of(AcceptPath)
def accept_path(op: AcceptPath) -> None:
    drawn, fed, starts = op.sampled.tolist(), op.node_ids.tolist(), op.cu_num_logits.tolist()
    longest = op.out_path.shape[1]
    for r, slot in enumerate(op.slots.tolist()):
        start, rows = starts[r], starts[r + 1] - starts[r]
        path: list[int] = []
        if slot >= 0 and rows > 0:
            children: dict[tuple[int, int], int] = {}
            for column, parent in enumerate(op.parents[slot, : rows - 1].tolist()):
                children.setdefault((parent, fed[start + column + 1]), column + 1)
            node: int | None = 0
            while node is not None and len(path) < longest:
                path.append(node)
                node = children.get((node, drawn[start + node]))
        emitted, padding = [drawn[start + node] for node in path], longest - len(path)
        op.out_path[r] = torch.tensor(path + [-1] * padding)
        op.out_tokens[r] = torch.tensor(emitted + [0] * padding)
        op.num_sampled[r] = len(path)
        if op.num_rejected is not None:
            op.num_rejected[r] = rows - len(path)
        if op.counts is not None and op.sources is not None:
            # a request without logits rows has not even a root
            verified = op.sources[slot, : max(rows - 1, 0)].tolist() if slot >= 0 else []
            accepted = [verified[node - 1] for node in path if node > 0]
            for which, found in enumerate((verified, accepted)):
                counts = [found.count(source) for source in (1, 2, 3)]
                op.counts[r, which] = torch.tensor(counts)


@of(GatherRows)
def gather_rows(op: GatherRows) -> None:
    live = op.rows >= 0
    for source, out in zip(op.sources, op.outs, strict=True):
        out[: op.rows.shape[0]][live] = source[op.rows[live]]


@of(CompactCaches)
def compact_caches(op: CompactCaches) -> None:
    starts, cu, moves = op.query_start_loc.tolist(), op.cu_num_logits.tolist(), []
    for r, nodes in enumerate(op.path.tolist()):
        tail = cu[r + 1] - cu[r]
        root = starts[r + 1] - tail
        # the path's end is the first entry outside the tail; later entries are stale
        on_path = takewhile(lambda node, tail=tail: 0 <= node < tail, nodes)
        moves += [(root + node, root + depth) for depth, node in enumerate(on_path)]
    for (cache, group), layout in zip(op.caches.entries, op.caches.layouts, strict=True):
        rows, page = unpacked(cache, layout), cache.shape[2]
        slots = op.slot_mappings[group].tolist()
        places = [(slots[source], slots[target]) for source, target in moves]
        places = [place for place in places if min(place) >= 0]
        # all are read before any is written
        moved = [rows[source // page, :, source % page].clone() for source, _ in places]
        for (_, target), row in zip(places, moved, strict=True):
            rows[target // page, :, target % page] = row
        if layout is not None:
            cache.copy_(packed(rows, layout))
