# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of the plugin's own work in a step on a CPU, and its attention against vLLM's.

    python -m benchmarks.cpu_ops [--repeats 200]

One request, T=0, 63 nodes of which a path of 6 is accepted. `tiny` has the sizes of the pair in
`benchmarks/tiny`, `0.6B` those of Qwen3-0.6B (vocabulary 152k). Matrix products compare ours with
vLLM's (oneDNN's) on machines where ours are used. Attention is one layer of trees, interleaved with
vLLM's causal C++ kernel on the same cache.
On a busy machine, trust the minimum over many repeats, and the ratio of two minima, not medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor
from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from bastion_kernels import (
    AttentionLayer,
    AttentionStep,
    KVCompactor,
    KVLayout,
    accept_path,
    ancestor_bits,
    bind_slots,
    bind_tails,
    choose_budget,
    context_rows,
    expand_best_first,
    gather_rows,
    take_best,
    topk_logprobs,
    tree_positions,
)
from bastion_kernels.cpu.linear import pack_weight
from benchmarks import parser_of
from vllm_bastion.cpu.attention import cache_layout
from vllm_bastion.cpu.linear import has_linear

NODES, DEPTH, TOP_K, PATH, SLOTS, PAGE = 63, 15, 16, 6, 16, 128


@dataclass(frozen=True)
class Sizes:
    vocab: int
    hidden: int
    aux_layers: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


PAIRS = {
    "tiny": Sizes(1024, 192, 3, 6, 6, 2, 32, torch.float32),
    "0.6B": Sizes(151_936, 1024, 5, 28, 16, 8, 128, torch.bfloat16),
}


def milliseconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 3:  # the first turns compile and allocate
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(sizes: Sizes) -> dict[str, Callable[[], object]]:
    """The ops of a step in their order, on matching tensors."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(DEPTH, sizes.vocab)).to(sizes.dtype)
    tokens = torch.zeros(1, DEPTH, TOP_K, dtype=torch.int32)
    logprobs = torch.zeros(1, DEPTH, TOP_K)
    slots, row_slots = torch.tensor([3]), torch.full((SLOTS,), -1)
    out_tokens = torch.zeros(1, NODES, dtype=torch.int64)
    parents, depths = (torch.zeros(SLOTS, NODES, dtype=torch.int32) for _ in range(2))
    log_rho, size = torch.zeros(SLOTS, NODES), torch.zeros(SLOTS, dtype=torch.int32)
    bits = torch.zeros(SLOTS, NODES + 1, NODES // 32 + 1, dtype=torch.int32)
    num_verify, tails = torch.zeros_like(size), torch.zeros_like(size)
    emitted, rest, take_scratch = (torch.zeros_like(size) for _ in range(3))
    logits_start, rows_start = ints(0, 0), ints(0, 0)
    promised, cost = torch.zeros(SLOTS), torch.linspace(10, 20, 2049)
    rows, base = NODES + 1, torch.zeros((), dtype=torch.int32)
    starts, positions = ints(0, rows), torch.arange(rows)
    placed = torch.zeros_like(positions)
    topk_logprobs(logits, TOP_K, tokens[0], logprobs[0])
    tree = (out_tokens, parents, depths, log_rho, size)
    lattice = logprobs[:, :, None]
    scores, branching = torch.randn(1, DEPTH, TOP_K, TOP_K), tuple(map(torch.zeros_like, tree))
    expand_best_first(tokens, lattice, TOP_K, slots, *tree)
    # the target draws the tokens of a path of PATH nodes
    drawn, fed = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    fed[1:] = out_tokens[0] + 1
    node = int((depths[3] == PATH).nonzero()[-1]) + 1 if (depths[3] == PATH).any() else NODES
    while node > 0:
        parent = int(parents[3, node - 1])
        drawn[parent], node = fed[node], parent
    path = torch.full((1, DEPTH + 1), -1, dtype=torch.int32)
    sampled, num_sampled = torch.zeros(1, DEPTH + 1, dtype=torch.int64), ints(0)
    accept = (drawn, fed, parents, slots, starts, path, sampled, num_sampled)
    accept_path(*accept)
    capacity, source = DEPTH + 1, torch.zeros(DEPTH + 1, dtype=torch.int64)
    kept_positions, rejected = torch.zeros_like(source), ints(0)
    hidden = [torch.randn(rows, sizes.hidden).to(sizes.dtype) for _ in range(sizes.aux_layers)]
    kept_hidden = [torch.empty(capacity, sizes.hidden, dtype=sizes.dtype) for _ in hidden]
    shape = (9, sizes.kv_heads, PAGE, 2 * sizes.head_dim)
    caches = [torch.zeros(shape, dtype=sizes.dtype) for _ in range(sizes.layers)]
    layout = packing(sizes)
    compactor = KVCompactor(caches, [0] * len(caches), [layout] * len(caches))
    mapping = torch.arange(200, 200 + rows)[None]
    return {
        "bind_tails": lambda: bind_tails(slots, starts, row_slots, tails),
        "tree_positions": lambda: tree_positions(positions, depths, slots, starts, starts, placed),
        "accept_path": lambda: accept_path(*accept),
        "KVCompactor": lambda: compactor.compact(mapping, starts, starts, path),
        "context_rows": lambda: context_rows(
            ints(0, capacity), ints(0), starts, starts, path, positions, num_sampled, ints(0),
            source, kept_positions, rejected, capacity,
        ),
        "gather_rows": lambda: gather_rows(hidden, source, kept_hidden),
        "bind_slots": lambda: bind_slots(slots, num_sampled, row_slots, base, emitted),
        "topk_logprobs": lambda: topk_logprobs(logits, TOP_K, tokens[0], logprobs[0]),
        "expand_best_first": lambda: expand_best_first(tokens, lattice, TOP_K, slots, *tree),
        "with transitions": lambda: expand_best_first(
            tokens, scores.log_softmax(-1), TOP_K, slots, *branching
        ),
        "ancestor_bits": lambda: ancestor_bits(parents, slots, bits),
        "choose_budget": lambda: choose_budget(
            log_rho, slots, size, cost, base, num_verify, promised
        ),
        "take_best": lambda: take_best(
            log_rho, slots, size, rest, 40, logits_start, rows_start, take_scratch
        ),
    }  # fmt: skip


def isa_of(sizes: Sizes) -> str:
    return _get_attn_isa(sizes.dtype, PAGE, sizes.head_dim, "auto")


def packing(sizes: Sizes) -> KVLayout:
    return cache_layout(isa_of(sizes), PAGE, sizes.head_dim, sizes.dtype)


def cached(lengths: list[int], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random cache, a block table over shuffled blocks, and vLLM's views of the cache."""
    pages = [-(-length // PAGE) for length in lengths]
    blocks, heads, dim = sum(pages) + 7, sizes.kv_heads, sizes.head_dim
    free, table = torch.randperm(blocks).int(), torch.zeros(len(lengths), max(pages)).int()
    for r, count in enumerate(pages):
        table[r, :count], free = free[:count], free[count:]
    cache = torch.randn(blocks, heads, PAGE, 2 * dim).to(sizes.dtype)
    keys, values = cache.view(blocks, heads, 2 * PAGE, dim).chunk(2, 2)
    return cache, table, keys, values


def scheduled(starts: Tensor, lengths: Tensor, sizes: Sizes) -> Tensor:
    return vllm_ops.cpu_attn_get_scheduler_metadata(
        len(lengths), sizes.heads, sizes.kv_heads, sizes.head_dim, lengths, sizes.dtype, starts,
        True, -1, isa_of(sizes), True,
    )  # fmt: skip


def attention(context: int, rows: int, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Our kernel on a tree, and vLLM's on as many causal rows."""
    cache, table, keys, values = cached([context + rows], sizes)
    query = torch.randn(rows, sizes.heads, sizes.head_dim).to(sizes.dtype)
    out, scale = torch.empty_like(query), sizes.head_dim**-0.5
    starts, lengths = ints(0, rows), ints(context + rows)
    parents = ints(*[max(0, node // 3 - 1) for node in range(rows - 1)])[None]
    slots, bits = torch.tensor([0]), torch.zeros(1, rows, (rows + 31) // 32, dtype=torch.int32)
    ancestor_bits(parents, slots, bits)
    step = AttentionStep(table, starts, lengths, ints(rows), slots, bits)
    theirs = (query, keys, values, out.clone(), starts, lengths, scale, True, None, -1, table, 0.0)
    layout, plan = packing(sizes), scheduled(starts, lengths, sizes)
    return {
        "ours": lambda: AttentionLayer(cache, scale, layout=layout)(step, query, out),
        "theirs": lambda: vllm_ops.cpu_attention_with_kv_cache(*theirs, plan, None),
    }


def products(rows: Sequence[int], sizes: Sizes) -> dict[int, dict[str, Callable[[], object]]]:
    """bf16 rows times the widest matrix of every layer, with cold weights: ours and vLLM's."""
    weights = [torch.randn(6 * sizes.hidden, sizes.hidden).bfloat16() for _ in range(sizes.layers)]
    packed = [pack_weight(weight) for weight in weights]
    handlers = [vllm_ops.create_onednn_mm(weight.t(), 32) for weight in weights]

    def runs(x: Tensor) -> dict[str, Callable[[], object]]:
        return {
            "ours": lambda: [torch.ops.vllm_bastion.linear(x, own, None) for own in packed],
            "theirs": lambda: [vllm_ops.onednn_mm(own, x, None) for own in handlers],
        }

    return {count: runs(torch.randn(count, sizes.hidden).bfloat16()) for count in rows}


def compare(name: str, runs: dict[str, Callable[[], object]], repeats: int) -> None:
    times = milliseconds(runs, repeats)
    low, mid = ({k: of(v) for k, v in times.items()} for of in (min, median))
    print(
        f"{name}: {mid['ours']:.3f} ({low['ours']:.3f}), vLLM's {mid['theirs']:.3f} "
        f"({low['theirs']:.3f}), ratio {mid['ours'] / mid['theirs']:.2f} "
        f"({low['ours'] / low['theirs']:.2f})"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    current_platform.import_kernels()
    # the first matrix product asks the operating system for AMX, as in an engine
    torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()
    print(f"{torch.get_num_threads()} threads, {repeats} repeats, median (best) ms")
    for name, sizes in PAIRS.items():
        times = milliseconds(step(sizes), repeats)
        for op, taken in times.items():
            print(f"{name:5} {op:22} {median(taken):8.3f} ({min(taken):.3f})")
        # a step has either choose_budget or take_best, and one kind of expansion
        del times["take_best"], times["with transitions"]
        total, best = (sum(map(of, times.values())) for of in (median, min))
        print(f"{name:5} {'together':22} {total:8.3f} ({best:.3f})")
    if has_linear():
        for rows, runs in products((1, 8, 17, 33, 65), PAIRS["0.6B"]).items():
            compare(f"28 products, bfloat16, {rows} rows", runs, max(repeats // 10, 5))
    for dtype in (torch.bfloat16, torch.float32):
        sizes, kind = replace(PAIRS["0.6B"], dtype=dtype), str(dtype)[6:]
        for context in (1024, 4096):
            for rows in (64, 16):
                name = f"attention, {kind}, {rows} rows, {context} cached"
                compare(name, attention(context, rows, sizes), max(repeats // 4, 5))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
