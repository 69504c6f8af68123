# SPDX-License-Identifier: Apache-2.0
"""Triton kernel that divides a step's attention among programs, once for all layers.

A q-block is BLOCK_Q query rows of one request; it has ceil(visible rows / BLOCK_N) tiles of cached
rows. All q-blocks of a request read nearly the same tiles. Were they to do so at different times,
a long context would come from memory once for each of them: the L2 cache forgets it in between. So
up to WIDTH neighbouring q-blocks of a request form a bundle, and the programs that work on a bundle
form a team of as many members, one to a q-block, which walk the same tiles at the same time.

Bundles of one width are laid end to end, once for each key head, and this line is cut into equal
runs of `chunk` tiles, one for each team:

    width 3    |- bundle 0, head 0 -|- bundle 0, head 1 -|- bundle 1, head 0 -|- ...
    teams      |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|- ...
                 x 3 programs

With a window the tiles before that of the bundle's first row are left out. The plan does not know
which rows are a tail, so it takes the smallest position that the row could have.

A run that ends with one q-block and begins the next has two to begin and to merge. So where there
is a team for each head of each bundle, a bundle's part of the line is rounded up to whole runs,
unless the runs become longer by more than a second q-block costs.

There are as many lines as there are widths in the step. `chunk` is the smallest for which all teams
together have no more members than there are programs: nobody walks further than that, and what is
lost to rounding is less than one team for each width in use.
"""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton

__all__ = ["BUNDLE_FIELDS", "RUN_FIELDS", "first_tile", "plan_kernel"]

# int32 values kept for a bundle, the last one unused, and for a program, which has those of its
# first bundle too: what it begins with then comes from memory at once
BUNDLE_FIELDS = 8
RUN_FIELDS = 16


@triton.jit
def _last_not_above(table_ptr, stride, factor, low, high, limit, STEPS: tl.constexpr):
    """Last place in low .. high - 1 of an ascending table with value * factor <= limit."""
    for _ in range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        value = tl.load(table_ptr + middle * stride, mask=open_, other=0)
        right = value * factor <= limit
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & ~right, middle, high)
    return low - 1


@triton.jit
def first_tile(
    context, row, rows,
    WINDOW: tl.constexpr, MAX_TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile that the window of a bundle's first row begins in, at the earliest."""
    # a node is at its root's position or behind it
    tile = context + tl.minimum(row, tl.maximum(rows - MAX_TAIL, 0))
    tile = tl.maximum(tile - WINDOW + 1, 0) // BLOCK_N
    return tile if WINDOW else tile * 0


@triton.jit(do_not_specialize=["num_reqs"])
def plan_kernel(
    # [R+1] int32, [R] int32
    query_start_loc_ptr,
    seq_lens_ptr,
    # [2] int32: tiles in a run, programs with work (written)
    header_ptr,
    # [capacity, BUNDLE_FIELDS] int32, by width: request, first row within it, first tile in the
    # line of one head, tiles; of the request its first row in the batch, its rows, and the cached
    # rows before them (written)
    bundles_ptr,
    # [programs, RUN_FIELDS] int32: first bundle, member, members of the team, first position in the
    # line, end position; the last BUNDLE_FIELDS are those of the first bundle (written)
    runs_ptr,
    num_reqs,
    programs,
    KV_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_TAIL: tl.constexpr,
    CLASSES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BUNDLE_FIELDS: tl.constexpr,
    RUN_FIELDS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Lay out the step's bundles and cut them into runs. Grid: (1,).

    Args:
        WIDTH: most q-blocks in a bundle; 1 + 2 + ... + WIDTH <= programs.
        WINDOW, MAX_TAIL: the window or 0, and the most rows of a tail.
        CLASSES, PROGRAMS: powers of two >= WIDTH and >= programs.
        CAPACITY: power of two >= rows // (BLOCK_Q * WIDTH) + requests of any step.
        SEARCH_STEPS: >= log2(CAPACITY) + 1.
        SECOND: tiles that take as long as a second q-block in a run does, besides its own.
    """
    # Candidate i belongs to the last request r with query_start_loc[r] // span + r <= i: no prefix
    # sum over requests is needed, at the price of some candidates without rows.
    span: tl.constexpr = BLOCK_Q * WIDTH
    candidate = tl.arange(0, CAPACITY)
    low = tl.zeros([CAPACITY], tl.int32)
    high = low + num_reqs
    for _ in range(SEARCH_STEPS):
        open_ = low < high
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle, mask=open_, other=0)
        right = start // span + middle <= candidate
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & ~right, middle, high)
    request = low - 1
    owned = request >= 0
    first = tl.load(query_start_loc_ptr + request, mask=owned, other=0)
    last = tl.load(query_start_loc_ptr + request + 1, mask=owned, other=0)
    length = tl.load(seq_lens_ptr + request, mask=owned, other=0)
    rows = last - first
    nth = candidate - first // span - request
    used = owned & (nth * span < rows)
    # the request's q-blocks shared out evenly over its bundles
    blocks = (rows + BLOCK_Q - 1) // BLOCK_Q
    number = tl.maximum((blocks + WIDTH - 1) // WIDTH, 1)
    block = nth * blocks // number
    width = tl.where(used, (nth + 1) * blocks // number - block, 0)
    row = block * BLOCK_Q
    # the last row of the bundle sees the context and the request's rows up to itself
    context = tl.maximum(length - rows, 0)
    seen = context + tl.minimum(row + width * BLOCK_Q, rows)
    skipped = first_tile(context, row, rows, WINDOW, MAX_TAIL, BLOCK_N)
    tiles = tl.where(used, (seen + BLOCK_N - 1) // BLOCK_N - skipped, 0)

    kind = tl.arange(0, CLASSES)
    members = kind + 1
    mine = width[None, :] == kind[:, None] + 1
    bundles = tl.sum(mine.to(tl.int32), 1)
    ends = tl.sum(tl.where(mine, tiles[None, :], 0), 1) * KV_HEADS
    area = tl.sum(ends * members, 0)
    most = tl.max(tiles, 0)
    # Merging a cut costs about what a tile does, so the time of a q-block of n tiles cut into s is
    # near n/s + s: runs shorter than sqrt(n) would be slower.
    shortest = tl.maximum(tl.ceil(tl.sqrt(most.to(tl.float32))).to(tl.int32), 1)
    chunk = tl.maximum((area + programs - 1) // programs, shortest)
    # Rounding adds less than one team to each line, so this many tiles are certainly enough; so
    # is one team for each line.
    spare = tl.maximum(programs - tl.sum(tl.where(bundles > 0, members, 0), 0), 0)
    longest = tl.max(ends, 0)
    enough = tl.where(spare > 0, (area + spare - 1) // tl.maximum(spare, 1), longest)
    enough = tl.maximum(tl.minimum(enough, longest), chunk)
    while chunk < enough:
        middle = (chunk + enough) // 2
        needed = tl.sum((ends + middle - 1) // middle * members, 0)
        chunk = tl.where(needed <= programs, chunk, middle + 1)
        enough = tl.where(needed <= programs, middle, enough)

    # The shortest runs of which whole ones make up every bundle's part of the line. Runs of `most`
    # tiles are enough where there is a team for each head of each bundle.
    fits = tl.sum(bundles * members, 0) * KV_HEADS <= programs
    whole = chunk
    enough = tl.where(fits, tl.minimum(most, chunk + SECOND + 1), chunk)
    while whole < enough:
        middle = (whole + enough) // 2
        needed = tl.sum((tiles + middle - 1) // middle * width, 0) * KV_HEADS
        whole = tl.where(needed <= programs, whole, middle + 1)
        enough = tl.where(needed <= programs, middle, enough)
    if fits & (whole <= chunk + SECOND):
        chunk = whole
        tiles = (tiles + chunk - 1) // chunk * chunk

    # Bundles and tiles before each bundle in the line of its width: one scan over the pair.
    pair = tl.where(mine, (tiles.to(tl.int64) + (1 << 32))[None, :], 0)
    before = tl.sum(tl.where(mine, tl.cumsum(pair, 1) - pair, 0), 0)
    ends = (tl.sum(pair, 1) & 0xFFFFFFFF).to(tl.int32) * KV_HEADS
    offsets = tl.cumsum(bundles, 0) - bundles
    place = (before >> 32).to(tl.int32) + tl.sum(tl.where(mine, offsets[:, None], 0), 0)

    entry_ptr = bundles_ptr + place * BUNDLE_FIELDS
    tl.store(entry_ptr, request, mask=used)
    tl.store(entry_ptr + 1, row, mask=used)
    tl.store(entry_ptr + 2, (before & 0xFFFFFFFF).to(tl.int32), mask=used)
    tl.store(entry_ptr + 3, tiles, mask=used)
    tl.store(entry_ptr + 4, first, mask=used)
    tl.store(entry_ptr + 5, rows, mask=used)
    tl.store(entry_ptr + 6, context, mask=used)

    needs = (ends + chunk - 1) // chunk * members
    bases = tl.cumsum(needs, 0) - needs
    busy = tl.sum(needs, 0)
    tl.store(header_ptr, chunk)
    tl.store(header_ptr + 1, busy)

    # program -> width, team, member
    program = tl.arange(0, PROGRAMS)
    which = tl.sum((bases[:, None] <= program[None, :]).to(tl.int32), 0) - 1
    chosen = kind[:, None] == which[None, :]
    within = program - tl.sum(tl.where(chosen, bases[:, None], 0), 0)
    line = within // (which + 1) * chunk
    end = tl.minimum(line + chunk, tl.sum(tl.where(chosen, ends[:, None], 0), 0))
    low = tl.sum(tl.where(chosen, offsets[:, None], 0), 0)
    high = low + tl.sum(tl.where(chosen, bundles[:, None], 0), 0)
    # the table of bundles must be complete before it is searched
    tl.debug_barrier()
    first_bundle = _last_not_above(
        bundles_ptr + 2, BUNDLE_FIELDS, KV_HEADS, low, high, line, SEARCH_STEPS
    )
    run_ptr = runs_ptr + program * RUN_FIELDS
    exists = program < programs
    tl.store(run_ptr, first_bundle, mask=exists)
    tl.store(run_ptr + 1, within % (which + 1), mask=exists)
    tl.store(run_ptr + 2, which + 1, mask=exists)
    tl.store(run_ptr + 3, line, mask=exists)
    tl.store(run_ptr + 4, tl.where(program < busy, end, 0), mask=exists)
    has_work = exists & (program < busy)
    for field in tl.static_range(BUNDLE_FIELDS - 1):
        value = tl.load(bundles_ptr + first_bundle * BUNDLE_FIELDS + field, mask=has_work)
        tl.store(run_ptr + RUN_FIELDS - BUNDLE_FIELDS + field, value, mask=has_work)
