# SPDX-License-Identifier: Apache-2.0
"""The drafter's context: the target's rows on their way to the drafter's KV cache.

A drafter attends to keys and values that it computes from the target's hidden states. After a step
that verified drafts these are the rows of the accepted path only, in order: one more than a tree is
deep at most, so that rejected nodes cost nothing.

A step without a draft only keeps its rows' hidden states, while the buffers have capacity. They
become keys and values when drafting resumes; when a request leaves, because its blocks may then be
cached or belong to another request; and after a limited number of steps, before a sliding window
frees a block. If all of them belong to a request that leaves, and nothing can reuse its blocks,
they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu.input_batch import InputBatch

from bastion_kernels import context_rows, gather_rows
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step import Step

_MAX_STEPS = 64
_MAX_VIEWS = 1024
# With a shorter sliding window, a block may be freed before its rows are stored.
_MIN_WINDOW = 2 * _MAX_STEPS

# Computes and stores keys and values of T rows: hidden states, tensors [T or more, H]; positions,
# [T]; slots, [T or more] of each of the drafter's KV cache groups.
Store = Callable[[Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor]], None]


class DraftContext:
    """Buffers of M rows, the most of a step, and the rows in them that are not stored yet."""

    def __init__(self, trees: Trees, max_rows: int, store: Store) -> None:
        device, reqs = trees.device, len(trees.row_slots)
        self._trees, self._store = trees, store
        # Rows of the step, [M], and what belongs to them. Hidden states: tensors [M, H].
        self.source = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self.source)
        self._slots: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self._rejected = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._layout = torch.zeros(2 * reqs + 1, dtype=torch.int32, device=device)
        # Whether a request keeps its blocks while its rows wait: one row a step, or several.
        self._may_defer = self._may_defer_several = False
        # With at most this many rows waiting, a plain step always fits.
        self._max_rows, self._full = max_rows, max_rows - reqs
        self.num_rows = self._num_steps = 0
        self._requests: set[str] = set()  # owners of the rows that wait
        # [begin, end) of rows -> views of these rows in every buffer; most steps reuse them.
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def allocate(self, hidden: Sequence[torch.Tensor]) -> None:
        """Once, in the profiling run, so that vLLM counts it before it sizes the KV cache."""
        if not self.hidden:
            self.hidden = [h.new_zeros(len(self.source), h.shape[1]) for h in hidden]

    def bind(self, specs: Sequence[KVCacheSpec], *, may_defer: bool) -> None:
        """The KV cache is made: specs of the drafter's groups."""
        self._slots = [torch.zeros_like(self.source) for _ in specs]
        self._may_defer = may_defer and all(map(_keeps_blocks, specs))
        self._may_defer_several = self._may_defer and all(_keeps_blocks(one, True) for one in specs)
        self.num_rows = self._num_steps = 0
        self._requests.clear()
        self._views.clear()

    def accepted(
        self,
        step: Step,
        batch: InputBatch,
        hidden: Sequence[torch.Tensor],
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        slots: Sequence[torch.Tensor] = (),
    ) -> tuple[InputBatch, list[torch.Tensor], torch.Tensor]:
        """Replace each request's tree rows by its accepted path, padded to at most L + 1 rows.

        hidden: tensors [T, H]; num_sampled, num_rejected: [R]; slots: [T] cache slots of each
        group, if the path's are needed, too. Returns the batch, the hidden states [P, H] and
        num_rejected [R] for the drafter: vLLM drops a request's last ``num_rejected`` rows.

        Row i of a request is the i-th node of its path, or a row that is dropped. In the buffers
        they follow the rows that wait.
        """
        num_reqs, lens, first = batch.num_reqs, self._lens(step), self.num_rows
        layout = np.zeros(2 * num_reqs + 1, dtype=np.int32)
        start = layout[: num_reqs + 1]
        np.cumsum(lens, out=start[1:])
        layout[num_reqs + 1 :] = step.base_rows - 1
        total = int(start[-1])
        on_device = async_tensor_h2d(layout, out=self._layout[: len(layout)])
        starts, source = on_device[: num_reqs + 1], self.source[:total]
        own, rejected = slice(first, first + total), self._rejected[:num_reqs]
        positions = self._positions[own]
        context_rows(
            starts,
            on_device[num_reqs + 1 :],
            batch.query_start_loc[: num_reqs + 1],
            batch.cu_num_logits,
            self._trees.path,
            batch.positions,
            num_sampled,
            num_rejected,
            source,
            # Positions stay linear: after compaction node i of the path is the request's row i.
            positions,
            rejected,
            int(lens.max()),
            slots,
            [group[own] for group in self._slots] if slots else (),
        )
        accepted_hidden = [out[own] for out in self.hidden]
        gather_rows(hidden, source, accepted_hidden)
        accepted_batch = replace(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=lens.astype(np.int32),
            positions=positions,
            query_start_loc=starts,
            query_start_loc_np=start,
        )
        return accepted_batch, accepted_hidden, rejected

    def _lens(self, step: Step) -> np.ndarray:
        """[R] rows of each request in the drafter's context: before its root, and of its path.

        Only the device may know how many nodes were verified, so it is as many as were scheduled.
        """
        return step.base_rows + np.minimum(step.nodes, self._trees.depth)

    # ---- rows of steps that draft nothing -----------------------------------------------

    def keep(
        self,
        step: Step,
        batch: InputBatch,
        hidden: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        *counts: torch.Tensor,
        prompts_wait: bool,
    ) -> None:
        """End a step without a draft: its rows wait, or are stored.

        counts: [R] sampled and rejected tokens, if it verified drafts; see `accepted`.
        """
        count = int(self._lens(step).sum()) if step.verifies else batch.num_tokens
        waits = count <= self._max_rows and self._may_wait(batch, prompts_wait)
        if not waits or self.num_rows + count > self._max_rows:
            self.flush()
        begin, end = self.num_rows, self.num_rows + count
        if step.verifies:
            num_sampled, num_rejected = counts
            self.accepted(step, batch, hidden, num_sampled, num_rejected, slots)
        elif waits:
            rows = (*hidden, batch.positions, *slots)
            own = [row if row.shape[0] == count else row[:count] for row in rows]
            torch._foreach_copy_(self._rows(begin, end), own)
        else:
            self._store(hidden, batch.positions[:count], slots)
            return
        self.num_rows = end
        self._num_steps += 1
        self._requests.update(batch.req_ids)
        if not waits or self._num_steps == _MAX_STEPS or end > self._full:
            self.flush()

    def _rows(self, begin: int, end: int) -> list[torch.Tensor]:
        """Views of rows of the buffers."""
        if (begin, end) not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            buffers = (*self.hidden, self._positions, *self._slots)
            self._views[begin, end] = [buffer[begin:end] for buffer in buffers]
        return self._views[begin, end]

    def _may_wait(self, batch: InputBatch, prompts_wait: bool) -> bool:
        """Whether the rows of a step without a draft may be stored later.

        Prompt rows do not wait while more prompts do: the next chunk would fill the buffer.
        """
        if batch.num_tokens == batch.num_reqs:
            return self._may_defer
        return self._may_defer_several and not (prompts_wait and batch.has_prefill)

    def leave(self, request: str, needed: bool) -> None:
        """A request gives up its blocks. `needed`: whether their content may be used again."""
        if request not in self._requests:
            return
        if not needed and len(self._requests) == 1:
            self.num_rows = 0
        self.flush()

    def flush(self) -> None:
        """Store the rows that wait."""
        rows, self.num_rows, self._num_steps = slice(self.num_rows), 0, 0
        self._requests.clear()
        if rows.stop:
            self._store(self.hidden, self._positions[rows], self._slots)

    def warm_up(self) -> None:
        """Compile the ops without slots, and with slots at an aligned and an unaligned address."""
        one = self._layout[:1].zero_()
        two = one.new_zeros(2)
        slots, rejected = self._slots, self._rejected[:1]
        for caches in (((), ()), (slots, slots), (slots, [group[1:] for group in slots])):
            context_rows(two, one, two, two, self._trees.path, self._positions, one, one,
                         self.source, self._positions, rejected, 1, *caches)  # fmt: skip
        none = self.source[:1].fill_(-1)
        gather_rows(self.hidden, none, [torch.empty_like(h[:1]) for h in self.hidden])


def _keeps_blocks(spec: KVCacheSpec, several: bool = False) -> bool:
    """Whether a request keeps a row's block until the row is stored.

    several: for several rows of a step, whose blocks a sliding window may free at once.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_keeps_blocks(inner, several) for inner in spec.kv_cache_specs.values())
    if isinstance(spec, SlidingWindowSpec):
        return not several and bool(spec.sliding_window >= _MIN_WINDOW)
    return isinstance(spec, FullAttentionSpec)
