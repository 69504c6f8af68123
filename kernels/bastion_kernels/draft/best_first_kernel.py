# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `best_first`.

Why the kernel takes one node per round. Rounds can be saved by going depth by depth (the N best
prefixes of a depth are among the N best of the depth above, times K), but each of those D rounds
selects N out of some N ln N candidates: about 60 compare-exchange stages over 2,048 keys for
N = 256, shared-memory traffic in most of them, times D = 15. Here the frontier stays in the
registers of one warp and a round is two integer minima (one `redux.sync` each), two cached loads
and a few selects per 32 entries: compiled for sm_90, 65 / 138 / 230 instructions for N = 64 / 256 /
512, without a barrier or a store, and independent of K. N rounds of that are some 10,000 cycles at
N = 64 and 60,000 at N = 256 (latencies included, by count and not by measurement); the sorts would
be no faster, and far more code. Requests run side by side, one warp each.

Two things make the round short. Scores are stored as costs -log rho >= 0, whose fp32 bits sort like
integers, so the minimum is an integer one. Parent number, depth and rank of the winner are packed
into one integer, whose minimum among equal costs also breaks ties.
"""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def cost_of(logprob):
    """-logprob, at least +0.0; NaN becomes +inf, as if the candidate were impossible."""
    cost = tl.where(logprob < 0.0, 0.0 - logprob, 0.0)
    return tl.where(logprob == logprob, cost, float("inf"))


@triton.jit
def _next(row_ptr, stride, size, copy_ptr, copy_size, after_cost, after, BLOCK_M: tl.constexpr):
    """Cost and candidate that follow (after_cost, after) in a row, +inf if none is left.

    size: candidates of the row, 0 for none. copy_size: the same of the row at `copy_ptr`, of which
    only one is read. after_cost: int32, bits of a cost, which sort like it; -1 for the first of the
    row.
    """
    candidate = tl.arange(0, BLOCK_M)
    logprob = tl.load(row_ptr + candidate * stride, mask=candidate < size, other=float("-inf"))
    if copy_ptr is not None:
        on_copy = tl.load(copy_ptr + candidate, mask=candidate < copy_size, other=float("-inf"))
        logprob = tl.where(copy_size > 0, on_copy, logprob)
    bits = cost_of(logprob).to(tl.int32, bitcast=True)
    later = (bits > after_cost) | ((bits == after_cost) & (candidate > after))
    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(later, bits, none)
    least = tl.min(bits, 0)
    found = tl.min(tl.where(bits == least, candidate, BLOCK_M), 0)
    return least.to(tl.float32, bitcast=True), found


@triton.jit
def expand_kernel(
    candidates_ptr,
    logprobs_ptr,
    rows_ptr,
    slots_ptr,
    out_tokens_ptr,
    parents_ptr,
    depths_ptr,
    log_rho_ptr,
    num_nodes_ptr,
    log_kappa_ptr,
    copied_ptr,
    places_ptr,
    copy_rows_ptr,
    sources_ptr,
    candidates_r,
    candidates_d,
    candidates_m,
    logprobs_r,
    logprobs_d,
    logprobs_p,
    logprobs_m,
    rows_r,
    rows_d,
    rows_p,
    rows_m,
    copied_r,
    copy_rows_r,
    sources_s,
    out_tokens_r,
    parents_s,
    depths_s,
    log_rho_s,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (R,). The frontier, in registers. Column i belongs to node i + 1, the last column also
    to the root: node BLOCK may overwrite it because the loop ends with that node.

    cost  [BLOCK] int32, bits of -log rho (fp32) of the node's next child; +inf if it has none left
    entry [BLOCK] int32, node number << 16 | middle << 8 | rank of that child; the middle is the
          child's candidate, with IN_ORDER, where that is the rank, the node's depth
    score [BLOCK] fp32, -log rho of the node itself
    own   [BLOCK] int32, 1 << 24 on the copy | depth of the node << 16 | row of its children, 255
          for none << 8 | its candidate; with IN_ORDER the entry by which the node was added
    above [BLOCK] int32, parent of the node; not with IN_ORDER, where `own` has it
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        candidates_ptr += row * candidates_r
        logprobs_ptr += row * logprobs_r
        rows_ptr += row * rows_r
        none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)

        column = tl.arange(0, BLOCK)
        owner = (column + 1) % BLOCK
        on_copy = tl.full([], 0, tl.int32)
        if L > 0:
            copied_ptr += row * copied_r
            places_ptr += row * copied_r
            copy_rows_ptr += row * copy_rows_r
            on_copy = (tl.load(places_ptr) >= 0).to(tl.int32)
        if IN_ORDER:
            first, middle = cost_of(tl.load(logprobs_ptr)), 0
        else:
            size = tl.where((on_copy == 0) & (D > 0), M, 0)
            first, middle = _next(
                logprobs_ptr, logprobs_m, size, copy_rows_ptr, on_copy * (M + 1), -1, -1, BLOCK_M
            )
        cost = tl.where(owner == 0, first, float("inf")).to(tl.int32, bitcast=True)
        entry = tl.where(owner == 0, middle << 8, 0)
        score = tl.zeros([BLOCK], tl.float32)
        above = tl.zeros([BLOCK], tl.int32)
        own = tl.where(owner == 0, on_copy << 24, 0)
        count = tl.full([], 0, tl.int32)
        best = tl.min(cost, 0)
        while (count < N) & (best < none):
            winner = tl.min(tl.where(cost == best, entry, 0x7FFFFFFF), 0)
            parent, middle, rank = winner >> 16, (winner >> 8) & 0xFF, winner & 0xFF
            moved, opened = owner == parent, column == count
            new = best.to(tl.float32, bitcast=True)
            count += 1
            # the winner's entry moves on to the next sibling, the new node opens its own
            if IN_ORDER:
                depth = middle
                ptr = logprobs_ptr + depth * logprobs_d + (rank + 1) * logprobs_m
                sibling_cost = cost_of(tl.load(ptr, mask=rank + 1 < TOP_K, other=float("-inf")))
                ptr = logprobs_ptr + (depth + 1) * logprobs_d
                child_cost = cost_of(tl.load(ptr, mask=depth + 1 < D, other=float("-inf")))
                entry = tl.where(moved, entry + 1, entry)
                entry = tl.where(opened, (count << 16) | ((depth + 1) << 8), entry)
                own = tl.where(opened, winner, own)
            else:
                candidate = middle
                parent_own = tl.sum(tl.where(moved, own, 0), 0)
                on_copy = parent_own >> 24
                depth, parent_row = (parent_own >> 16) & 0xFF, (parent_own >> 8) & 0xFF
                row_ptr = logprobs_ptr + depth * logprobs_d + parent_row * logprobs_p
                ptr = row_ptr + candidate * logprobs_m
                taken = tl.load(ptr, mask=on_copy == 0, other=float("-inf"))
                more = rank + 1 < TOP_K
                copy_ptr, copy_size, is_copy = copy_rows_ptr, 0, on_copy
                if L > 0:
                    copy_ptr += depth * (M + 1)
                    copy_size = tl.where((on_copy != 0) & more, M + 1, 0)
                    ptr = copy_ptr + candidate
                    taken = tl.where(
                        on_copy == 0, taken, tl.load(ptr, mask=on_copy != 0, other=float("-inf"))
                    )
                    place = tl.load(places_ptr + depth, mask=on_copy != 0, other=-1)
                    is_copy = (candidate == place).to(tl.int32)
                taken = cost_of(taken).to(tl.int32, bitcast=True)
                size = tl.where(more & (on_copy == 0), M, 0)
                sibling_cost, sibling = _next(
                    row_ptr, logprobs_m, size, copy_ptr, copy_size, taken, candidate, BLOCK_M
                )
                own_row = candidate
                if HAS_ROWS:
                    ptr = rows_ptr + depth * rows_d + parent_row * rows_p + candidate * rows_m
                    known = (candidate < M) & (parent_row < 255)
                    own_row = tl.load(ptr, mask=known, other=-1) & 0xFF  # -1 becomes 255
                row_ptr = logprobs_ptr + (depth + 1) * logprobs_d + own_row * logprobs_p
                size = tl.where((depth + 1 < D) & (own_row < 255) & (is_copy == 0), M, 0)
                if L > 0:
                    copy_ptr += M + 1
                    copy_size = tl.where((is_copy != 0) & (depth + 1 < L), M + 1, 0)
                child_cost, child = _next(
                    row_ptr, logprobs_m, size, copy_ptr, copy_size, -1, -1, BLOCK_M
                )
                entry = tl.where(moved, (parent << 16) | (sibling << 8) | (rank + 1), entry)
                entry = tl.where(opened, (count << 16) | (child << 8), entry)
                above = tl.where(opened, parent, above)
                new_own = (is_copy << 24) | ((depth + 1) << 16) | (own_row << 8) | candidate
                own = tl.where(opened, new_own, own)
            cost = tl.where(moved, (score + sibling_cost).to(tl.int32, bitcast=True), cost)
            cost = tl.where(opened, (new + child_cost).to(tl.int32, bitcast=True), cost)
            score = tl.where(opened, new, score)
            best = tl.min(cost, 0)

        used, real = column < count, column < N
        if IN_ORDER:
            above, depth, candidate = own >> 16, ((own >> 8) & 0xFF) + 1, own & 0xFF
        else:
            depth, candidate = (own >> 16) & 0xFF, own & 0xFF
        token_ptr = candidates_ptr + (depth - 1) * candidates_d + candidate * candidates_m
        token = tl.load(token_ptr, mask=used & (candidate < M), other=0).to(tl.int64)
        if L > 0:
            alone = used & (candidate == M)
            copied = tl.load(copied_ptr + depth - 1, mask=alone, other=0).to(tl.int64)
            token = tl.where(alone, copied, token)
            source = tl.where(own >> 24 == 0, 1, tl.where(candidate < M, 3, 2))
            source = tl.where(used, source, 0)
            tl.store(sources_ptr + slot * sources_s + column, source, mask=real)
        tl.store(out_tokens_ptr + row * out_tokens_r + column, token, mask=real)
        tl.store(parents_ptr + slot * parents_s + column, tl.where(used, above, -1), mask=real)
        tl.store(depths_ptr + slot * depths_s + column, tl.where(used, depth, 0), mask=real)
        shift = 0.0
        if log_kappa_ptr is not None:
            shift = tl.load(log_kappa_ptr + slot)
        score = tl.where(used, shift - score, float("-inf"))
        tl.store(log_rho_ptr + slot * log_rho_s + column, score, mask=real)
        tl.store(num_nodes_ptr + slot, count)
