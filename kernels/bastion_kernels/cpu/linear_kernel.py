# SPDX-License-Identifier: Apache-2.0
"""The loops of `linear.cpu`, compiled by Numba and run by all of PyTorch's threads.

A unit of work is some blocks of 16 columns for a block of rows. A block of columns lies in one
piece, so that it is read in a line, once from memory and for further rows from the cache; what
comes next is asked for ahead, because the processor alone does not keep up where it multiplies.

One instruction takes a word of a row: two of bfloat16, or four of int8, as the weight is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from bastion_kernels.cpu.machine import add_atomically, call_llvm, float_of, pointer, spread
from bastion_kernels.cpu.native import compile_for_threads, inner

__all__ = ["CALL", "COLUMNS", "compiled", "rows_at_once"]

COLUMNS = 16  # of a vector of float32
_ROWS = 24  # whose sums are in registers together, of which there are 32
_DEPTH = 2048  # words of a row whose weights, for 16 columns, stay in a cache of the second level
_AHEAD = 8192  # bytes
_BLOCK_BYTES = 1 << 19  # rows of x that share a thread's cache
_UNITS = 4  # for each thread, so that a slow one holds up the others less
_LINE = 4 * COLUMNS  # bytes of a row of sums, or of a word's weights

# What a call is told: addresses, bytes and numbers.
CALL = np.dtype([
    (name, np.int64)
    for name in (
        "units", "started", "threads", "scratch", "scratch_bytes", "at_once", "x", "x_row", "rows",
        "words", "packed", "blocks", "bias", "out", "scales",
    )
])  # fmt: skip

_I32, _I64, _I16 = ir.IntType(32), ir.IntType(64), ir.IntType(16)
_ZERO_POINT = 128  # of rows in int8, which are unsigned
_FLOATS, _INTEGERS = (ir.VectorType(kind, COLUMNS) for kind in (ir.FloatType(), _I32))


def _row_bytes_of(words):
    """Of a copied row: powers of two would put all rows into the same few places of a cache."""
    return 64 * ((words + 15) // 16) + 64


_row_bytes = inner(_row_bytes_of)


def rows_at_once(rows: int, words: int) -> tuple[int, int]:
    """Rows of a block, and a thread's scratch in bytes."""
    row_bytes = _row_bytes_of(words)
    block = min(rows, max(1, _BLOCK_BYTES // row_bytes // _ROWS) * _ROWS)
    # What sums begin with, the sums, the rows, and their scales.
    return block, _LINE * (1 + block) + block * row_bytes + 64 * ((4 * block + 63) // 64)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _number(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


@intrinsic
def _multiply(
    typingctx, count, x, x_row, packed, words, start, start_row, sums, out, out_row, last, scales,
    x_scales,
):  # fmt: skip
    """sums[count, 16] = start + x @ block; to `sums` as they are, if `last` to `out` in bf16.

    All but `last` are integers: addresses, strides in bytes, and numbers. scales, of the columns,
    and x_scales, of the rows, are float32 and for int8 alone: 0 means bfloat16.
    """

    def emit(builder, narrow, count, x, x_row, packed, words, start, start_row, sums, out, out_row,
             last, scales, x_scales):  # fmt: skip
        kind = _INTEGERS if narrow else _FLOATS
        dot = "avx512.vpdpbusd.512" if narrow else "avx512bf16.dpbf16ps.512"
        strides = [_number(row) for row in range(count)]
        totals = [cgutils.alloca_once(builder, kind) for _ in strides]
        lines = [builder.add(x, builder.mul(x_row, row)) for row in strides]
        for row, total in zip(strides, totals, strict=True):
            at = builder.add(start, builder.mul(start_row, row))
            builder.store(builder.load(_at(builder, at, kind), align=64), total)
        with cgutils.for_range(builder, words) as loop:
            place = builder.add(packed, builder.mul(loop.index, _number(_LINE)))
            weights = builder.load(_at(builder, place, _INTEGERS), align=64)
            ahead = _at(builder, builder.add(place, _number(_AHEAD)), ir.IntType(8))
            how = [ir.Constant(_I32, number) for number in (0, 3, 1)]  # read, keep, data
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, *how)
            offset = builder.mul(loop.index, _number(4))
            for line, total in zip(lines, totals, strict=True):
                word = builder.load(_at(builder, builder.add(line, offset), _I32), align=4)
                product = call_llvm(
                    builder, f"llvm.x86.{dot}", kind, builder.load(total), spread(builder, word),
                    weights,
                )  # fmt: skip
                builder.store(product, total)
        with builder.if_else(last) as (then, otherwise):
            with then:
                halves = ir.VectorType(_I16, COLUMNS)
                by = builder.load(_at(builder, scales, _FLOATS), align=4) if narrow else None
                for row, total in zip(strides, totals, strict=True):
                    numbers = builder.load(total)
                    if narrow:
                        at = builder.add(x_scales, builder.mul(_number(4), row))
                        mine = builder.load(_at(builder, at, ir.FloatType()), align=4)
                        numbers = builder.fmul(builder.sitofp(numbers, _FLOATS), by)
                        numbers = builder.fmul(numbers, spread(builder, mine))
                    rounded = call_llvm(
                        builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", halves, numbers
                    )
                    at = builder.add(out, builder.mul(out_row, row))
                    builder.store(rounded, _at(builder, at, halves), align=2)
            with otherwise:
                for row, total in zip(strides, totals, strict=True):
                    at = builder.add(sums, builder.mul(_number(_LINE), row))
                    builder.store(builder.load(total), _at(builder, at, kind), align=64)

    def codegen(context, builder, signature, args):
        count, *others = args
        narrow = builder.icmp_signed("!=", others[-2], _number(0))
        which = builder.add(count, builder.select(narrow, _number(_ROWS), _number(0)))
        end = builder.append_basic_block("end")
        switch = builder.switch(which, end)
        for number in range(2 * _ROWS):
            case = builder.append_basic_block(f"rows.{number}")
            switch.add_case(_number(number + 1), case)
            builder.position_at_end(case)
            emit(builder, number >= _ROWS, number % _ROWS + 1, *others)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, types.boolean, types.int64, types.int64), codegen


@inner
def _copy(t, first, count, row_bytes, into):
    for row in range(count):
        source = carray(pointer(t.x + (first + row) * t.x_row), (t.words,), np.int32)
        line = carray(pointer(into + row * row_bytes), (t.words,), np.int32)
        for word in range(t.words):
            line[word] = source[word]


@inner
def _round(t, first, count, row_bytes, into, scales):
    """Copy bfloat16 rows as int8, each by the scale of its largest number."""
    numbers = carray(pointer(scales), (count,), np.float32)
    for row in range(count):
        source = carray(pointer(t.x + (first + row) * t.x_row), (4 * t.words,), np.int16)
        line = carray(pointer(into + row * row_bytes), (4 * t.words,), np.uint8)
        largest = np.int32(0)  # bits of numbers without their sign are in their order
        for i in range(4 * t.words):
            largest = max(largest, np.int32(source[i]) & np.int32(0x7FFF))
        top = float_of(largest << np.int32(16))
        numbers[row] = top / np.float32(127)
        by = np.float32(127) / top if top > 0 else np.float32(0)
        for i in range(4 * t.words):
            number = float_of(np.int32(source[i]) << np.int32(16)) * by
            line[i] = np.uint8(np.int32(np.rint(number)) + _ZERO_POINT)


@inner
def _start(bias, block, line):
    """What the float32 sums of 16 columns begin with."""
    numbers = carray(pointer(line), (COLUMNS,), np.int32)
    if bias:
        mine = carray(pointer(bias + 2 * COLUMNS * block), (COLUMNS,), np.int16)
        for column in range(COLUMNS):
            numbers[column] = np.int32(mine[column]) << 16
    else:
        numbers[:] = 0


@inner
def _block(packed, words, x, x_row, count, start, sums, out, out_row, scales, x_scales):
    """16 columns for `count` rows, in parts of K, and of rows as even as can be."""
    parts = (count + _ROWS - 1) // _ROWS
    for done in range(0, words, _DEPTH):
        now = min(_DEPTH, words - done)
        last = done + now == words
        for part in range(parts):
            first = count * part // parts
            rows = count * (part + 1) // parts - first
            line = sums + _LINE * first
            _multiply(
                rows, x + first * x_row + 4 * done, x_row, packed + _LINE * done, now,
                line if done else start, _LINE if done else 0, line, out + first * out_row, out_row,
                last, scales, x_scales + 4 * first,
            )  # fmt: skip


def _run(told):
    t = carray(told, (1,), CALL)[0]
    counters = carray(told, (2,), np.int64)
    # Of the threads there are, not of those asked for: a nested region has one.
    mine = t.scratch + add_atomically(counters, 1) * t.scratch_bytes
    sums = mine + _LINE
    copies = sums + _LINE * t.at_once
    row_bytes = _row_bytes(t.words)
    x_scales = copies + row_bytes * t.at_once
    step = max(1, t.blocks // (_UNITS * t.threads))
    steps = (t.blocks + step - 1) // step
    held, count = -1, 0
    while True:
        unit = add_atomically(counters, 0)
        first = unit // steps * t.at_once
        if first >= t.rows:
            break
        if first != held:
            held, count = first, min(t.at_once, t.rows - first)
            if t.scales:
                _round(t, first, count, row_bytes, copies, x_scales)
            else:
                _copy(t, first, count, row_bytes, copies)
        begin = unit % steps * step
        for block in range(begin, min(begin + step, t.blocks)):
            start, scales = mine, np.int64(0)
            if t.scales:
                start, scales = t.bias + _LINE * block, t.scales + _LINE * block
            else:
                _start(t.bias, block, start)
            out = t.out + 2 * COLUMNS * (first * t.blocks + block)
            _block(
                t.packed + block * t.words * _LINE, t.words, copies, row_bytes, count, start, sums,
                out, 2 * COLUMNS * t.blocks, scales, x_scales,
            )  # fmt: skip


@lru_cache
def compiled() -> Any:
    """The loops; see `on_all_threads`."""
    return compile_for_threads(_run)
