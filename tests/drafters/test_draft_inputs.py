# SPDX-License-Identifier: Apache-2.0
"""What a graph prepares for a draft, against the ops and vLLM's kernel that run without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bastion_kernels import draft_inputs
from tests import references
from vllm_bastion.cpu.replacements.dflash import _prepare_dflash_inputs

SLOTS, WIDTH, MASK, MAX_LEN = 11, 6, 77, 90
PAGES = 4, 8
VERSIONS = [references.draft_inputs]
if not torch.cuda.is_available():
    VERSIONS.append(draft_inputs.triton)  # in the interpreter


class Batch:
    """Accepted paths of `reqs` requests, in a graph for `padded` ones."""

    def __init__(self, seed: int, reqs: int, padded: int, anchored: bool) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int, dtype: Any = torch.int64) -> Tensor:
            return torch.randint(low, high, shape, generator=generator).to(dtype)

        self.reqs, self.padded, self.queries = reqs, padded, 5 - anchored
        self.anchored = anchored
        rows = integers(1, 9, reqs)
        self.starts = torch.full((SLOTS + 1,), int(rows.sum()), dtype=torch.int32)
        self.starts[: reqs + 1] = torch.cat([torch.zeros(1).long(), rows.cumsum(0)])
        # Some are close to the model's longest sequence, or past the end of the block table.
        first = integers(0, MAX_LEN, reqs)
        self.positions = torch.cat(
            [start + torch.arange(int(n)) for start, n in zip(first, rows, strict=True)]
        )
        self.path = integers(0, 4, SLOTS, WIDTH, dtype=torch.int32)  # stale past the batch
        for r, count in enumerate(rows.tolist()):
            nodes = torch.randperm(count - 1, generator=generator)[: WIDTH - 1] + 1
            nodes = nodes[: int(integers(0, len(nodes) + 1, 1))].sort().values
            self.path[r] = -1
            self.path[r, : len(nodes) + 1] = torch.cat([torch.zeros(1).long(), nodes])
        self.slots = torch.full((SLOTS,), -1)
        self.slots[:reqs] = torch.randperm(SLOTS, generator=generator)[:reqs]
        self.sampled = integers(0, 900, SLOTS)
        # Block 0 must not be written.
        self.tables = [integers(0, 9, SLOTS, 20 // (i + 1), dtype=torch.int32) for i in range(2)]

    def prepared(self, run: Any) -> dict[str, Any]:
        rows, size = self.padded * WIDTH, SLOTS * self.queries + 3
        out: dict[str, Any] = {
            "source": torch.full((rows,), -7),
            "context_positions": torch.full((rows + 4,), -7),
            "context_slots": [torch.full((rows + 4,), -7) for _ in PAGES],
            "row_slots": torch.full((SLOTS,), -7),
            "input_ids": torch.full((size,), -7, dtype=torch.int32),
            "query_positions": torch.full((size,), -7),
            "query_slots": [torch.full((size,), -7) for _ in PAGES],
            "is_padding": torch.ones(size, dtype=torch.bool),
            "query_starts": torch.full((SLOTS + 1,), -7, dtype=torch.int32),
            "seq_lens": torch.full((SLOTS,), -7, dtype=torch.int32),
        }
        given = self.slots, self.starts, self.path, self.positions, self.sampled
        run(*given, self.tables, PAGES, *out.values(), self.queries, MASK, MAX_LEN)
        return out

    def without_graph(self) -> dict[str, Any]:
        """The same for the requests only, by `context_rows` and vLLM's kernel."""
        starts, one = self.starts[: self.reqs + 1], torch.zeros(self.reqs, dtype=torch.int32)
        count, size = self.reqs * WIDTH, SLOTS * self.queries + 3
        context = torch.arange(0, count + 1, WIDTH, dtype=torch.int32)
        accepted = (self.path[: self.reqs] >= 0).sum(1).int()
        source, places, rejected = torch.zeros(count).long(), torch.zeros(count).long(), one.clone()
        references.context_rows(
            context, one, starts, starts, self.path, self.positions, accepted, one, source, places,
            rejected, WIDTH,
        )  # fmt: skip
        out: dict[str, Any] = {"source": source, "query_slots": [], "context_slots": []}
        for table, page in zip(self.tables, PAGES, strict=True):
            out["context_positions"], slots = torch.full((count,), -7), torch.full((count,), -7)
            out["input_ids"] = torch.zeros(size, dtype=torch.int32)
            out["query_positions"] = torch.zeros(size, dtype=torch.int64)
            out["is_padding"] = torch.ones(size, dtype=torch.bool)
            out["query_starts"] = torch.full((SLOTS + 1,), -7, dtype=torch.int32)
            out["seq_lens"] = torch.full((SLOTS,), -7, dtype=torch.int32)
            drafted = torch.full((size,), -7)
            samples = [torch.zeros(SLOTS * 4, dtype=torch.int64) for _ in range(3)]
            state = torch.zeros(SLOTS), torch.zeros(SLOTS, dtype=torch.int64)
            _prepare_dflash_inputs(
                self.reqs, 1,
                *(
                    x.numpy()
                    for x in (
                        out["input_ids"], out["query_positions"], out["query_starts"],
                        out["seq_lens"], drafted, out["context_positions"],
                        slots, *samples, *state, places, context, self.slots, self.sampled,
                        self.sampled, accepted, rejected, *state, table.flatten(),
                    )
                ),
                table.stride(0), MASK, page, self.queries, 4, SLOTS, size, MAX_LEN, 0,
                self.anchored, -1, 1, 1, 32, out["is_padding"].numpy(),
            )  # fmt: skip
            out["query_slots"].append(drafted)
            out["context_slots"].append(slots)
        return out


@pytest.mark.parametrize("run", VERSIONS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("anchored", [False, True])
def test_a_graph_prepares_what_a_step_without_one_does(run: Any, seed: int, anchored: bool) -> None:
    reqs = 1 + seed
    batch = Batch(seed, reqs, reqs + (0, 3)[seed % 2], anchored)
    found, expected = batch.prepared(run), batch.without_graph()
    rows, queries = reqs * WIDTH, batch.padded * batch.queries
    kept = expected["context_slots"][0] != -1
    live = (batch.path[:reqs] >= 0).flatten()
    assert torch.equal(found["source"][:rows][live], expected["source"][live])
    assert found["source"][:rows][~live].eq(-1).all() and found["source"][rows:].eq(-1).all()
    assert kept.any() and not kept[~live].any()
    sizes = dict.fromkeys(("context_positions", "context_slots"), rows)
    sizes |= dict.fromkeys(("input_ids", "query_positions", "is_padding", "query_slots"), queries)
    sizes |= {"query_starts": batch.padded + 1, "seq_lens": batch.padded}
    for name, size in sizes.items():
        ours, theirs = ([x] if isinstance(x, Tensor) else x for x in (found[name], expected[name]))
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own[:size], other[:size]), name
    assert torch.equal(found["row_slots"][: batch.padded], batch.slots[: batch.padded])
    for slots in found["context_slots"]:
        assert slots[rows : batch.padded * WIDTH].eq(-1).all()
