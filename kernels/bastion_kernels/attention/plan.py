# SPDX-License-Identifier: Apache-2.0
"""Triton kernel that divides a step's attention among programs (CTAs), once for all layers.

A q-block is BLOCK_Q query rows of one request; it has ceil(visible rows / BLOCK_N) tiles of cached
rows. Up to WIDTH neighbouring q-blocks of a request form a bundle, which a team of programs
processes, one for each q-block: they read the same tiles at the same time, because a long context
exceeds the L2 cache.

Bundles of one width, once for each key head, form a line, the work list of the teams of that width.
It is cut into equal runs of `chunk` tiles, one for each team:

    width 3    |- bundle 0, head 0 -|- bundle 0, head 1 -|- bundle 1, head 0 -|- ...
    teams      |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|- ...
                 x 3 programs

With a window, tiles before the window of the bundle's first row are skipped. The plan does not know
which rows belong to a tail, so it assumes the smallest position the row could have.

If there is a team for each head of each bundle, a bundle's part of the line is rounded up to whole
runs, unless that lengthens the runs by more than a second q-block in a run costs. `chunk` is the
smallest length for which the teams have no more members than there are programs.
"""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton

# int32 values of a bundle (the last is unused) and of a program. A program's include those of its
# first bundle, which saves a dependent load.
BUNDLE_FIELDS = 8
RUN_FIELDS = 16


@triton.jit
def _last_not_above(table, stride, factor, b_low, b_high, b_limit, STEPS: tl.constexpr):
    """Last place in low .. high - 1 of an ascending table with value * factor <= limit."""
    for _ in range(STEPS):
        m_open = b_low < b_high
        b_middle = (b_low + b_high) // 2
        b_value = tl.load(table + b_middle * stride, mask=m_open, other=0)
        m_right = b_value * factor <= b_limit
        b_low = tl.where(m_open & m_right, b_middle + 1, b_low)
        b_high = tl.where(m_open & ~m_right, b_middle, b_high)
    return b_low - 1


@triton.jit
def first_tile(
    context, row, rows,
    WINDOW: tl.constexpr, MAX_TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first tile that the window of a bundle's first row can reach."""
    # a node's position is never before its root's
    tile = context + tl.minimum(row, tl.maximum(rows - MAX_TAIL, 0))
    tile = tl.maximum(tile - WINDOW + 1, 0) // BLOCK_N
    return tile if WINDOW else tile * 0


@triton.jit(do_not_specialize=["num_reqs"])
def plan_kernel(
    # [R+1] int32, [R] int32
    query_start_loc,
    seq_lens,
    # [2] int32: tiles in a run, programs with work (written)
    header,
    # [capacity, BUNDLE_FIELDS] int32, by width: request, first row within it, first tile in the
    # line of one head, tiles; of the request its first row in the batch, its rows, and the cached
    # rows before them (written)
    bundles,
    # [programs, RUN_FIELDS] int32: first bundle, member, members of the team, first position in the
    # line, end position; the last BUNDLE_FIELDS are those of the first bundle (written)
    runs,
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
        SECOND: extra cost of a second q-block in a run, in tiles.
    """
    # Candidate bundle i belongs to the last request r with query_start_loc[r] // span + r <= i.
    # This avoids a prefix sum over requests; some candidates have no rows.
    span: tl.constexpr = BLOCK_Q * WIDTH
    o_c = tl.arange(0, CAPACITY)
    b_low = tl.zeros([CAPACITY], tl.int32)
    b_high = b_low + num_reqs
    for _ in range(SEARCH_STEPS):
        m_open = b_low < b_high
        middle = (b_low + b_high) // 2
        b_start = tl.load(query_start_loc + middle, mask=m_open, other=0)
        m_right = b_start // span + middle <= o_c
        b_low = tl.where(m_open & m_right, middle + 1, b_low)
        b_high = tl.where(m_open & ~m_right, middle, b_high)
    b_request = b_low - 1
    m_owned = b_request >= 0
    b_first = tl.load(query_start_loc + b_request, mask=m_owned, other=0)
    b_last = tl.load(query_start_loc + b_request + 1, mask=m_owned, other=0)
    b_length = tl.load(seq_lens + b_request, mask=m_owned, other=0)
    b_rows = b_last - b_first
    b_nth = o_c - b_first // span - b_request
    m_used = m_owned & (b_nth * span < b_rows)
    # divide the request's q-blocks evenly among its bundles
    b_blocks = (b_rows + BLOCK_Q - 1) // BLOCK_Q
    b_number = tl.maximum((b_blocks + WIDTH - 1) // WIDTH, 1)
    b_block = b_nth * b_blocks // b_number
    b_width = tl.where(m_used, (b_nth + 1) * b_blocks // b_number - b_block, 0)
    b_row = b_block * BLOCK_Q
    # the bundle's last row sees the context and the request's rows up to itself
    b_context = tl.maximum(b_length - b_rows, 0)
    b_seen = b_context + tl.minimum(b_row + b_width * BLOCK_Q, b_rows)
    b_skipped = first_tile(b_context, b_row, b_rows, WINDOW, MAX_TAIL, BLOCK_N)
    b_tiles = tl.where(m_used, (b_seen + BLOCK_N - 1) // BLOCK_N - b_skipped, 0)

    o_k = tl.arange(0, CLASSES)
    b_members = o_k + 1
    m_kind = b_width[None, :] == o_k[:, None] + 1
    b_bundles = tl.sum(m_kind.to(tl.int32), 1)
    b_ends = tl.sum(tl.where(m_kind, b_tiles[None, :], 0), 1) * KV_HEADS
    area = tl.sum(b_ends * b_members, 0)
    most = tl.max(b_tiles, 0)
    # Merging a part costs about as much as a tile. A q-block of n tiles in s parts takes about
    # n/s + s, so runs shorter than sqrt(n) would be slower.
    shortest = tl.maximum(tl.ceil(tl.sqrt(most.to(tl.float32))).to(tl.int32), 1)
    chunk = tl.maximum((area + programs - 1) // programs, shortest)
    # Upper bounds of `chunk`: rounding adds less than one team to each line, and one team per line
    # is always enough.
    spare = tl.maximum(programs - tl.sum(tl.where(b_bundles > 0, b_members, 0), 0), 0)
    longest = tl.max(b_ends, 0)
    enough = tl.where(spare > 0, (area + spare - 1) // tl.maximum(spare, 1), longest)
    enough = tl.maximum(tl.minimum(enough, longest), chunk)
    while chunk < enough:
        middle = (chunk + enough) // 2
        needed = tl.sum((b_ends + middle - 1) // middle * b_members, 0)
        chunk = tl.where(needed <= programs, chunk, middle + 1)
        enough = tl.where(needed <= programs, middle, enough)

    # The shortest run length for which every bundle's part can be rounded up to whole runs. `most`
    # tiles suffice if there is a team for each head of each bundle.
    fits = tl.sum(b_bundles * b_members, 0) * KV_HEADS <= programs
    whole = chunk
    enough = tl.where(fits, tl.minimum(most, chunk + SECOND + 1), chunk)
    while whole < enough:
        middle = (whole + enough) // 2
        needed = tl.sum((b_tiles + middle - 1) // middle * b_width, 0) * KV_HEADS
        whole = tl.where(needed <= programs, whole, middle + 1)
        enough = tl.where(needed <= programs, middle, enough)
    if fits & (whole <= chunk + SECOND):
        chunk = whole
        b_tiles = (b_tiles + chunk - 1) // chunk * chunk

    # Tiles and bundles before each bundle in the line of its width. Two int32 scans need fewer
    # registers than one int64 scan of pairs.
    b_line_tiles = tl.where(m_kind, b_tiles[None, :], 0)
    b_before = tl.sum(tl.where(m_kind, tl.cumsum(b_line_tiles, 1) - b_line_tiles, 0), 0)
    b_ends = tl.sum(b_line_tiles, 1) * KV_HEADS
    b_offsets = tl.cumsum(b_bundles, 0) - b_bundles
    b_index = b_offsets[:, None] + tl.cumsum(m_kind.to(tl.int32), 1) - 1
    o_place = tl.sum(tl.where(m_kind, b_index, 0), 0)

    p_entry = bundles + o_place * BUNDLE_FIELDS
    tl.store(p_entry, b_request, mask=m_used)
    tl.store(p_entry + 1, b_row, mask=m_used)
    tl.store(p_entry + 2, b_before, mask=m_used)
    tl.store(p_entry + 3, b_tiles, mask=m_used)
    tl.store(p_entry + 4, b_first, mask=m_used)
    tl.store(p_entry + 5, b_rows, mask=m_used)
    tl.store(p_entry + 6, b_context, mask=m_used)

    b_needs = (b_ends + chunk - 1) // chunk * b_members
    b_bases = tl.cumsum(b_needs, 0) - b_needs
    busy = tl.sum(b_needs, 0)
    tl.store(header, chunk)
    tl.store(header + 1, busy)

    # program -> width, team, member
    o_p = tl.arange(0, PROGRAMS)
    b_kind = tl.sum((b_bases[:, None] <= o_p[None, :]).to(tl.int32), 0) - 1
    m_chosen = o_k[:, None] == b_kind[None, :]
    b_within = o_p - tl.sum(tl.where(m_chosen, b_bases[:, None], 0), 0)
    b_line = b_within // (b_kind + 1) * chunk
    b_end = tl.minimum(b_line + chunk, tl.sum(tl.where(m_chosen, b_ends[:, None], 0), 0))
    b_low = tl.sum(tl.where(m_chosen, b_offsets[:, None], 0), 0)
    b_high = b_low + tl.sum(tl.where(m_chosen, b_bundles[:, None], 0), 0)
    # all bundles must be stored before the search
    tl.debug_barrier()
    b_first_bundle = _last_not_above(
        bundles + 2, BUNDLE_FIELDS, KV_HEADS, b_low, b_high, b_line, SEARCH_STEPS
    )
    p_run = runs + o_p * RUN_FIELDS
    m_exists = o_p < programs
    tl.store(p_run, b_first_bundle, mask=m_exists)
    tl.store(p_run + 1, b_within % (b_kind + 1), mask=m_exists)
    tl.store(p_run + 2, b_kind + 1, mask=m_exists)
    tl.store(p_run + 3, b_line, mask=m_exists)
    tl.store(p_run + 4, tl.where(o_p < busy, b_end, 0), mask=m_exists)
    m_work = m_exists & (o_p < busy)
    for field in tl.static_range(BUNDLE_FIELDS - 1):
        b_value = tl.load(bundles + b_first_bundle * BUNDLE_FIELDS + field, mask=m_work)
        tl.store(p_run + RUN_FIELDS - BUNDLE_FIELDS + field, b_value, mask=m_work)
