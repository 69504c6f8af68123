# SPDX-License-Identifier: Apache-2.0
"""The tables of memory in docs/configuration.md: `python tests/memory_tables.py`.

For Qwen3-8B and its DFlash drafter in bf16, with all of vLLM's defaults.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_bastion.cli.buffers import Part, Sizes, buffers, logits, size, total
from vllm_bastion.cli.memory import attention_bytes, tensor_bytes
from vllm_bastion.engine.limits import MOST_BITMASK_ROWS
from vllm_bastion.policy.trees import Trees

GIB = 2**30
# vLLM's `max_num_seqs` and `max_num_batched_tokens`, and where it takes them.
DEFAULTS = {
    "70 GiB or more, `vllm serve`": (1024, 8192),
    "70 GiB or more, `LLM()`; from 160 GiB also `vllm serve`": (1024, 16384),
    "less, or an A100, `vllm serve`": (256, 2048),
    "less, or an A100, `LLM()`": (256, 8192),
}
# 10^9 bytes, multiprocessors, and whether vLLM's defaults are those of 70 GiB and more.
GPUS = {
    "24 GB (RTX 4090)": (24, 128, False),
    "80 GB (H100)": (80, 132, True),
    "141 GB (H200)": (141, 132, True),
}
# vLLM's `gpu_memory_utilization`
_SHARE = 0.92
_NODES, _DEPTH, _TOP_K, _VOCAB, _HIDDEN, _ITEM = 255, 15, 16, 151_936, 4096, 2
_HEADS, _KV_HEADS, _DIM, _FFN, _LAYERS, _DRAFT_LAYERS = 32, 8, 128, 12_288, 36, 5


def sizes(requests: int, rows: int, processors: int = 132) -> Sizes:
    """Of Qwen3-8B's pair."""
    trees = Trees(
        max_num_reqs=requests, max_num_tokens=rows, num_nodes=_NODES, depth=_DEPTH, top_k=_TOP_K,
        budget=None, device=torch.device("cpu"),
    )  # fmt: skip
    most = GIB // (4 * _VOCAB)
    return Sizes(
        requests=requests,
        step_rows=rows,
        nodes=_NODES,
        depth=_DEPTH,
        vocab=_VOCAB,
        hidden=5 * _HIDDEN,
        draft_hidden=_HIDDEN,
        item=_ITEM,
        verified_rows=min(rows, requests * (1 + _NODES), max(requests, most)),
        bitmask_rows=min(64 * requests, MOST_BITMASK_ROWS),
        trees=tensor_bytes(trees),
        attention=attention_bytes(
            _HEADS, _KV_HEADS, _DIM, torch.bfloat16, processors, rows, requests
        ),
    )


def weights() -> int:
    """Bytes of the pair's weights. The drafter shares embeddings and head."""
    attention = _HIDDEN * _DIM * (2 * _HEADS + 2 * _KV_HEADS)
    layer = attention + 3 * _HIDDEN * _FFN
    return _ITEM * (
        2 * _VOCAB * _HIDDEN + (_LAYERS + _DRAFT_LAYERS) * layer + 5 * _HIDDEN * _HIDDEN
    )


def cached_token() -> int:
    """Bytes of a token's keys and values in all layers of the pair."""
    return 2 * (_LAYERS + _DRAFT_LAYERS) * _KV_HEADS * _DIM * _ITEM


def beyond_profile(sizes: Sizes) -> Part:
    """What a start takes beyond its profiling run: the logits of vLLM's warm-up."""
    drafted, verified = logits(sizes)
    return Part("beyond the profile", 0, max(0, verified.vllms - drafted.vllms))


def largest(parts: list[Part]) -> Part:
    """The parts, of which one is held at a time."""
    return Part("at a time", max(p.ours for p in parts), max(p.vllms for p in parts))


def defaults_table() -> str:
    """The four pairs of vLLM's defaults."""
    lines = [
        "| GPU memory | `max_num_seqs`, `max_num_batched_tokens` | buffers | logits of a draft | "
        "logits of a verification |",
        "|---|---|---|---|---|",
    ]
    for where, (requests, rows) in DEFAULTS.items():
        one = sizes(requests, rows)
        parts = [total(buffers(one)), *logits(one)]
        shown = " | ".join(f"{size(part.ours)} ({size(part.vllms)})" for part in parts)
        lines.append(f"| {where} | {requests}, {rows} | {shown} |")
    return "\n".join(lines)


def cache_tokens(gpu: str, offline: bool) -> tuple[int, int]:
    """Tokens for which the KV cache has room, and those of vLLM's DFlash."""
    size_gb, processors, large = GPUS[gpu]
    requests, rows = list(DEFAULTS.values())[(0 if large else 2) + offline]
    one = sizes(requests, rows, processors)
    kept, peak = total(buffers(one)), largest(logits(one))
    room = _SHARE * size_gb * 10**9 - weights()
    beyond = beyond_profile(one)
    ours = room - kept.ours - peak.ours
    vllms = room - kept.vllms - (peak.vllms - beyond.vllms)
    return int(ours // cached_token()), int(vllms // cached_token())


def cache_table() -> str:
    """The KV cache of three GPUs, and what a start takes beyond vLLM's profiling run."""
    lines = [
        "| GPU | started by | tokens in the KV cache | of vLLM's dflash | beyond the profile | "
        "of vLLM's dflash | left for it |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpu, (size_gb, processors, large) in GPUS.items():
        for offline, name in enumerate(("`vllm serve`", "`LLM()`")):
            requests, rows = list(DEFAULTS.values())[(0 if large else 2) + offline]
            beyond = beyond_profile(sizes(requests, rows, processors))
            ours, vllms = cache_tokens(gpu, bool(offline))
            lines.append(
                f"| {gpu} | {name} | {ours:,} | {vllms:,} | {size(beyond.ours)} | "
                f"{size(beyond.vllms)} | {size((1 - _SHARE) * size_gb * 10**9)} |"
            )
    return "\n".join(lines)


def of_hybrid(requests: int, rows: int) -> Sizes:
    """Of Qwen3.5-4B's shape: 24 gated delta layers, and a vocabulary of 248,320."""
    vocab, keys, values, heads = 248_320, 2048, 4096, 32
    row = 24 * ((3 * keys + values) * _ITEM + 4 * values + 8 * heads)
    largest_graph = 512
    most = min(GIB // (4 * vocab), largest_graph)
    return replace(
        sizes(requests, rows), vocab=vocab, hidden=5 * 2560, draft_hidden=2560,
        verified_rows=min(rows, requests * (1 + _NODES), max(requests, most)), recurrent_row=row,
    )  # fmt: skip


if __name__ == "__main__":
    print(defaults_table())
    print()
    print(cache_table())
