# SPDX-License-Identifier: Apache-2.0
"""The walk, what it counts, and the rows that move along its path."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels import KVCompactor
from bastion_kernels.accept.gather import GatherRows
from bastion_kernels.accept.sources import CountSources
from bastion_kernels.accept.walk import AcceptPath
from tests.references.declare import of


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


@of(CountSources)
def count_sources(op: CountSources) -> None:
    starts = op.cu_num_logits.tolist()
    for r, slot in enumerate(op.slots.tolist()):
        if slot < 0:
            continue
        # a request without logits rows has not even a root
        nodes = max(starts[r + 1] - starts[r] - 1, 0)
        verified = op.sources[slot, :nodes].tolist()
        accepted = [verified[node - 1] for node in op.path[r].tolist() if 0 < node <= nodes]
        for which, kinds in enumerate((verified, accepted)):
            for kind in kinds:
                if kind:
                    op.counts[which, kind - 1] += 1


@of(GatherRows)
def gather_rows(op: GatherRows) -> None:
    live = op.rows >= 0
    for source, out in zip(op.sources, op.outs, strict=True):
        out[: op.rows.shape[0]][live] = source[op.rows[live]]


def compact_caches(
    compactor: KVCompactor, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor,
    path: Tensor,
) -> None:  # fmt: skip
    """`KVCompactor.compact`."""
    num_reqs, width = path.shape
    tail = (cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]).long()[:, None]
    root = query_start_loc[1 : num_reqs + 1].long()[:, None] - tail
    depth = torch.arange(width, device=path.device)
    # the path ends at the first entry outside the tail; later entries are stale
    live = ((path >= 0) & (path < tail)).long().cumprod(1).bool() & (path != depth)
    from_rows, to_rows = (root + path)[live], (root + depth)[live]
    for (cache, group), layout in zip(compactor.entries, compactor.layouts, strict=True):
        source, target = slot_mappings[group][from_rows], slot_mappings[group][to_rows]
        keep = (source >= 0) & (target >= 0)
        source, target, page = source[keep], target[keep], cache.shape[2]
        rows = cache if layout is None else layout.read(cache)
        rows[target // page, :, target % page] = rows[source // page, :, source % page]
        if layout is not None:
            cache.copy_(layout.write(rows))
