# SPDX-License-Identifier: Apache-2.0
"""The walk, what it counts, and the rows that move along its path."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels import KVCompactor
from bastion_kernels.accept.gather import GatherRows
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


def compact_caches(
    compactor: KVCompactor, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor,
    path: Tensor,
) -> None:  # fmt: skip
    """`KVCompactor.compact`."""
    starts, cu = query_start_loc.tolist(), cu_num_logits.tolist()
    for (cache, group), layout in zip(compactor.entries, compactor.layouts, strict=True):
        before = cache.clone() if layout is None else layout.read(cache)
        after, page, slots = before.clone(), cache.shape[2], slot_mappings[group].tolist()
        for r, nodes in enumerate(path.tolist()):
            tail = cu[r + 1] - cu[r]
            root = starts[r + 1] - tail
            for depth, node in enumerate(nodes):
                if not 0 <= node < tail:  # the path's end; later entries are stale
                    break
                source, target = slots[root + node], slots[root + depth]
                if source >= 0 and target >= 0:
                    row = before[source // page, :, source % page]
                    after[target // page, :, target % page] = row
        cache.copy_(after if layout is None else layout.write(after))
