# SPDX-License-Identifier: Apache-2.0
"""The cases of a GPU: the ops of a step, attention, and the search for n-gram drafts.

vLLM keeps the token ids that are searched in the host's memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bastion_kernels import find_ngram
from bastion_kernels.draft.find_ngram import LONGEST
from benchmarks.ops.attention import attention_case
from benchmarks.ops.checks import check_op
from benchmarks.ops.sizes import QWEN3_8B, SMALL, Model
from benchmarks.ops.step import step_cases
from benchmarks.ops.timing import FA3, Bar, Case, Entry

# Heads, key heads and dimension of attention layers as published: gpt-oss, Qwen3-8B, Qwen3.5.
_HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 2)}
_ATTENTION_RATIO = 1.15


def find_copy_case(reqs: int, length: int, most: int, on_host: bool, device: str) -> Case:
    """The n-gram drafts of requests of `length` tokens, in rows for `most`."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

    g = torch.Generator().manual_seed(length)
    text = torch.randint(1000, (reqs, length), generator=g, dtype=torch.int32)
    for row in text:  # an end of eight tokens that occurs before
        row[length // 2 : length // 2 + 8] = row[-8:]
    buffer = UvaBuffer((reqs, most), torch.int32)
    buffer.cpu[:, :length] = text
    history = buffer.uva() if on_host else buffer.cpu.to(device)
    lengths = torch.full((reqs,), length, dtype=torch.int32, device=device)
    last = torch.zeros(reqs, 3, dtype=torch.int32, device=device)
    counts = torch.zeros(2, LONGEST + 1, dtype=torch.int32, device=device)
    found, slots = torch.zeros(reqs, dtype=torch.int64, device=device), torch.arange(reqs)
    args = history, lengths, slots.to(device), last, counts, found

    def check() -> None:
        check_op(find_ngram, args, ())
        assert int(found.min()) >> 32 >= 8, "no request repeats itself"

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
        for length in (40,) if small else (1024, 8192):
            for on_host in (False, True):
                name = f"n-grams in {length} tokens, R={reqs}, {'host' if on_host else 'device'}"
                most = 64 if small else 40960
                add("find_ngram", name, find_copy_case, reqs, length, most, on_host, device)
    return found
