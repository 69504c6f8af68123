# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk: a token was sampled at every node, follow it down the tree.

    node <- root
    repeat: emit sampled[node]; if a child of node carries that token, node <- child, else stop

Each node's token was drawn from the target's own distribution after the node's prefix, so what the
walk emits is what plain decoding would have emitted, whatever the tree: exact, at any temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check

__all__ = ["accept_path", "accept_path_reference"]

_OP = "accept_path"


def accept_path_reference(
    sampled: Tensor,
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    out_path: Tensor,
    out_tokens: Tensor,
    num_sampled: Tensor,
) -> None:
    """The walk, request by request; see `accept_path`."""
    drawn, fed, starts = sampled.tolist(), node_ids.tolist(), cu_num_logits.tolist()
    longest = out_path.shape[1]
    for r, slot in enumerate(slots.tolist()):
        start, rows = starts[r], starts[r + 1] - starts[r]
        path: list[int] = []
        if slot >= 0 and rows > 0:
            children: dict[tuple[int, int], int] = {}
            for column, parent in enumerate(parents[slot, : rows - 1].tolist()):
                children.setdefault((parent, fed[start + column + 1]), column + 1)
            node: int | None = 0
            while node is not None and len(path) < longest:
                path.append(node)
                node = children.get((node, drawn[start + node]))
        padding = longest - len(path)
        out_path[r] = torch.tensor(path + [-1] * padding)
        out_tokens[r] = torch.tensor([drawn[start + node] for node in path] + [0] * padding)
        num_sampled[r] = len(path)


def accept_path(
    sampled: Tensor,
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    out_path: Tensor,
    out_tokens: Tensor,
    num_sampled: Tensor,
) -> None:
    """Write the accepted path of every request and the tokens it emits.

    The logits rows cu_num_logits[r] .. cu_num_logits[r+1] - 1 of request r are its root and nodes
    1, 2, ...; only those can be accepted. Siblings should carry distinct tokens; if they do not,
    the lower column is taken. An inert request (slot -1) or one without logits rows emits nothing:
    path -1, tokens 0, count 0.

    Args:
        sampled: `[L]` int64, token drawn at every logits row.
        node_ids: `[L]` int64, token that every logits row feeds.
        parents: `[S, N]` int32, node number of each column's parent; -1 unused.
        slots: `[R]` int64, request slot of each row, or -1.
        cu_num_logits: `[R+1]` int32, first logits row of each request.
        out_path: `[R, D+1]` int32, node number at depth 0, 1, ..; -1 past the end, written.
        out_tokens: `[R, D+1]` int64, accepted tokens and the bonus token; 0 past the end, written.
        num_sampled: `[R]` int32, tokens emitted, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    reqs, longest = out_path.shape
    check(_OP, "sampled", sampled, (None,), torch.int64)
    check(_OP, "node_ids", node_ids, (sampled.shape[0],), torch.int64)
    check(_OP, "parents", parents, (None, None), torch.int32)
    check(_OP, "slots", slots, (reqs,), torch.int64)
    check(_OP, "cu_num_logits", cu_num_logits, (reqs + 1,), torch.int32)
    check(_OP, "out_path", out_path, (reqs, longest), torch.int32)
    check(_OP, "out_tokens", out_tokens, (reqs, longest), torch.int64)
    check(_OP, "num_sampled", num_sampled, (reqs,), torch.int32)
    accept_path_reference(
        sampled, node_ids, parents, slots, cu_num_logits, out_path, out_tokens, num_sampled
    )
