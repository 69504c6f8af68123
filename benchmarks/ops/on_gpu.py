# SPDX-License-Identifier: Apache-2.0
"""The cases of a GPU: the ops of a step, attention, and the search for n-gram drafts.

vLLM keeps the token ids that are searched in the host's memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bastion_kernels import find_ngram, ngram_table
from bastion_kernels.draft.ngram_table import LONGEST
from benchmarks.ops.attention import attention_case
from benchmarks.ops.sizes import QWEN3_8B, SMALL, Model
from benchmarks.ops.step import step_cases
from benchmarks.ops.timing import FA3, Bar, Case, Entry

# Heads, key heads and dimension of attention layers as published: gpt-oss, Qwen3-8B, Qwen3.5.
_HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 2)}
_ATTENTION_RATIO = 1.15


def find_ngram_case(reqs: int, length: int, most: int, on_host: bool, device: str) -> Case:
    """Requests of `length` tokens, in rows for `most`: 8 tokens are added, and 8 are found."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

    g = torch.Generator().manual_seed(length)
    text = torch.randint(1000, (reqs, length), generator=g, dtype=torch.int32)
    text[:, length // 2 : length // 2 + 8] = text[:, -8:]  # the end occurs before
    buffer = UvaBuffer((reqs, most), torch.int32)
    buffer.cpu[:, :length] = text
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    longs = partial(torch.zeros, dtype=torch.int64, device=device)
    last, found, table = ints(reqs, 3), longs(reqs), ngram_table(reqs * most, torch.device(device))
    lengths = ints(reqs)
    args = (
        buffer.uva() if on_host else buffer.cpu.to(device), lengths,
        torch.arange(reqs, device=device), last, ints(2, 2 * (LONGEST + 1)), longs(reqs), ints(1),
        longs(1), table, longs(1) + 1, found, ints(reqs, 31),
    )  # fmt: skip

    def check() -> None:
        for known, added in ((length // 2, 9), (length - 8, 8)):
            last[:, 2], lengths[:] = known, known + added
            find_ngram(*args)
        assert set(found.tolist()) == {17 << 32 | length // 2 + 8}

    return Case(check, [partial(find_ngram, *args)] * 5)


def gpu_cases(model: Model = QWEN3_8B, device: str = "cuda") -> list[Entry]:
    """The cases of a GPU; of `SMALL` such as the simulated GPU can compute."""
    small, found, nodes = model is SMALL, step_cases(model, device), model.nodes[0]

    def add(op: str, name: str, case: Any, *arguments: Any, bar: Bar | None = None) -> None:
        found.append(Entry(op, name, partial(case, *arguments), bar))

    for context in model.contexts:
        for reqs in (1, 8):
            name, bar = (
                f"attention R={reqs} N={nodes} context={context}",
                Bar(FA3, _ATTENTION_RATIO),
            )
            add("attention", name, attention_case, model, reqs, nodes, context, device, bar=bar)
    context = model.contexts[len(model.contexts) // 2]
    for dim, (heads, kv_heads) in ({16: (4, 2)} if small else _HEADS).items():
        shape = replace(model, head_dim=dim, heads=heads, kv_heads=kv_heads)
        name = f"attention {heads}/{kv_heads} heads of {dim}, R=8"
        add("heads", name, attention_case, shape, 8, nodes, context, device)
    for reqs in (2,) if small else (1, 16, 64):
        for length in (40,) if small else (1024, 32768, 131072):
            for on_host in (False, True):
                name = f"n-grams in {length} tokens, R={reqs}, {'host' if on_host else 'device'}"
                most = 64 if small else 131072
                add("find_ngram", name, find_ngram_case, reqs, length, most, on_host, device)
    return found
