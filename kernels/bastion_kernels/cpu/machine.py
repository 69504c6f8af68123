# SPDX-License-Identifier: Apache-2.0
"""What Numba has no words for: vector and matrix registers, bits of numbers, threads of PyTorch.

Each function is a few instructions that LLVM is asked for by name. They are compiled only where
they are called, so that a machine without AMX never sees AMX.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

__all__ = [
    "add_atomically",
    "add_rows",
    "bits_of",
    "call_llvm",
    "exp_of",
    "float_of",
    "float_of_half",
    "half_of",
    "has_tiles",
    "largest_of",
    "largest_of_each",
    "lowest_bit",
    "multiply_8x32",
    "pointer",
    "spread",
    "tile_config",
    "tile_load",
    "tile_multiply",
    "tile_release",
    "tile_store",
    "tile_zero",
    "widen",
]

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, 16)
_LOG2_E, _ROUNDING, _ROUNDING_BITS = 1.44269504088896, 12582912.0, 0x4B400000
# of exp between two powers of two, the highest first
_POWERS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1, 1.0, 1.0,
)  # fmt: skip


def call_llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """The result of one of LLVM's own functions, by its name and the type of what it gives."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args)


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """Where element `offset` of a flat array is."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [offset])


@intrinsic
def pointer(typingctx, address):
    """An int64 address as a pointer, for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def bits_of(typingctx, number):
    """The bits of a float32 as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """The float32 that has the bits of an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def float_of_half(typingctx, bits):
    """The float32 of a float16 that has the bits of an int16."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)

    return types.float32(types.int16), codegen


@intrinsic
def half_of(typingctx, number):
    """The bits, an int16, of the float16 nearest to a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), codegen


@intrinsic
def widen(typingctx, bits, at, out, to, count, step, out_step):
    """`count` runs of 32 bfloat16 as float32, `step` and `out_step` numbers apart; both flat."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        bits, at, out, to, count, step, out_step = args
        source = _address(context, builder, kinds[0], bits, at)
        target = _address(context, builder, kinds[2], out, to)
        halves, integers = (ir.VectorType(kind, 16) for kind in (ir.IntType(16), _I32))
        with cgutils.for_range(builder, count) as loop:
            for part in (0, 16):
                place = ir.Constant(_I64, part)
                run = builder.add(builder.mul(loop.index, step), place)
                run = builder.bitcast(builder.gep(source, [run]), halves.as_pointer())
                number = builder.zext(builder.load(run, align=2), integers)
                number = builder.shl(number, _many(_I32, 16))
                into = builder.add(builder.mul(loop.index, out_step), place)
                into = builder.bitcast(builder.gep(target, [into]), _VECTOR.as_pointer())
                builder.store(builder.bitcast(number, _VECTOR), into, align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(bits, index, out, index, index, index, index), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """The number of the lowest bit that is set in a uint32."""

    def codegen(context, builder, signature, args):
        return call_llvm(builder, "llvm.cttz.i32", _I32, args[0], ir.Constant(ir.IntType(1), 1))

    return types.int32(types.uint32), codegen


@intrinsic
def add_atomically(typingctx, array, index):
    """Add 1 to an int64 that other threads count with as well; gives what it was."""

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", at, ir.Constant(_I64, 1), "monotonic")

    return types.int64(array, types.int64), codegen


@intrinsic
def multiply_8x32(typingctx, a, a_at, a_row, b, b_at, b_row, c, c_at, c_row, length, add):
    """C[8, 32] = A[8, length] @ B[length, 32], plus C if `add`; float32, rows of given strides."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        a, a_at, a_row, b, b_at, b_row, c, c_at, c_row, length, add = args
        a = _address(context, builder, kinds[0], a, a_at)
        b = builder.bitcast(_address(context, builder, kinds[3], b, b_at), _F32.as_pointer())
        c = _address(context, builder, kinds[6], c, c_at)
        vector = _VECTOR.as_pointer()
        zero = ir.Constant(_VECTOR, [0.0] * 16)

        def at(base, row, stride, column):
            offset = builder.add(builder.mul(ir.Constant(_I64, row), stride), column)
            return builder.gep(base, [offset])

        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(16)]
        with builder.if_else(add) as (then, otherwise):
            with then:
                for i, total in enumerate(sums):
                    place = at(c, i // 2, c_row, ir.Constant(_I64, 16 * (i % 2)))
                    place = builder.bitcast(place, vector)
                    builder.store(builder.load(place, align=4), total)
            with otherwise:
                for total in sums:
                    builder.store(zero, total)
        with cgutils.for_range(builder, length) as loop:
            row = builder.gep(b, [builder.mul(loop.index, b_row)])
            halves = [
                builder.load(
                    builder.bitcast(builder.gep(row, [ir.Constant(_I64, 16 * half)]), vector),
                    align=4,
                )
                for half in range(2)
            ]
            for i in range(8):
                number = builder.load(at(a, i, a_row, loop.index))
                many = spread(builder, number)
                for half in range(2):
                    total = sums[2 * i + half]
                    builder.store(
                        call_llvm(
                            builder, "llvm.fma.v16f32", _VECTOR, many, halves[half],
                            builder.load(total),
                        ),
                        total,
                    )  # fmt: skip
        for i, total in enumerate(sums):
            place = builder.bitcast(at(c, i // 2, c_row, ir.Constant(_I64, 16 * (i % 2))), vector)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    index = types.int64
    signature = types.void(a, index, index, b, index, index, c, index, index, index, types.boolean)
    return signature, codegen


def _many(kind: Any, number: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, 16), [number] * 16)


def spread(builder: Any, number: Any) -> Any:
    """A number in all 16 places of a vector."""
    nothing = ir.Constant(ir.VectorType(number.type, 16), ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, nothing, _many(_I32, 0))


def _each_16(builder: Any, base: Any, begin: Any, end: Any, width: Any) -> Any:
    """Over `width` numbers by sixteens: index, their pointer, which of them are in [begin, end)."""
    begin, end = (spread(builder, builder.trunc(x, _I32)) for x in (begin, end))
    first = ir.Constant(ir.VectorType(_I32, 16), list(range(16)))
    with cgutils.for_range_slice(
        builder, ir.Constant(_I64, 0), width, ir.Constant(_I64, 16), inc=True
    ) as (index, _):
        at = builder.bitcast(builder.gep(base, [index]), _VECTOR.as_pointer())
        places = builder.add(spread(builder, builder.trunc(index, _I32)), first)
        live = builder.and_(
            builder.icmp_signed(">=", places, begin), builder.icmp_signed("<", places, end)
        )
        yield index, at, live


@intrinsic
def largest_of(typingctx, array, at, begin, end, width):
    """The largest of array[at + begin : at + end], in reach of `width`, a multiple of 16."""

    def codegen(context, builder, signature, args):
        array, at, begin, end, width = args
        base = _address(context, builder, signature.args[0], array, at)
        top = cgutils.alloca_once_value(builder, _many(_F32, -1e30))
        for _, place, live in _each_16(builder, base, begin, end, width):
            numbers = builder.select(live, builder.load(place, align=4), _many(_F32, -1e30))
            builder.store(
                call_llvm(builder, "llvm.maxnum.v16f32", _VECTOR, numbers, builder.load(top)), top
            )
        return call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", _F32, builder.load(top))

    index = types.int64
    return types.float32(array, index, index, index, index), codegen


@intrinsic
def largest_of_each(typingctx, array, count, out, out_at):
    """out = the largest of each of `count` runs of 64 float32 of `array`, NaN where all are NaN.

    Gives whether there is a NaN.
    """

    def codegen(context, builder, signature, args):
        array, count, out, out_at = args
        base = _address(context, builder, signature.args[0], array, ir.Constant(_I64, 0))
        out = _address(context, builder, signature.args[2], out, out_at)
        bit = ir.IntType(1)
        seen = cgutils.alloca_once_value(
            builder, ir.Constant(ir.VectorType(bit, 16), [ir.Constant(bit, 0)] * 16)
        )
        with cgutils.for_range(builder, count) as loop:
            run = builder.mul(loop.index, ir.Constant(_I64, 64))
            parts = []
            for part in range(4):
                place = builder.gep(base, [builder.add(run, ir.Constant(_I64, 16 * part))])
                place = builder.bitcast(place, _VECTOR.as_pointer())
                parts.append(builder.load(place, align=4))
            for a, b in ((0, 1), (2, 3)):
                either = builder.fcmp_unordered("uno", parts[a], parts[b])
                builder.store(builder.or_(builder.load(seen), either), seen)
            while len(parts) > 1:
                half = len(parts) // 2
                parts = [
                    call_llvm(builder, "llvm.maxnum.v16f32", _VECTOR, a, b)
                    for a, b in zip(parts[:half], parts[half:], strict=True)
                ]
            top = call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", _F32, parts[0])
            builder.store(top, builder.gep(out, [loop.index]))
        return call_llvm(builder, "llvm.vector.reduce.or.v16i1", bit, builder.load(seen))

    index = types.int64
    return types.boolean(array, index, out, index), codegen


@intrinsic
def exp_of(typingctx, array, at, begin, end, width, scale, top, out, out_at):
    """out = exp(scale * array - top) inside [begin, end) of `width` numbers, and 0 outside it.

    Gives their sum. An `out` of int16 gets bfloat16, rounded to nearest even. To the last bits of
    float32 for exponents from -87 to some tens; no smaller than exp(-87).
    """

    def codegen(context, builder, signature, args):
        kinds = signature.args
        array, at, begin, end, width, scale, top, out, out_at = args
        base = _address(context, builder, kinds[0], array, at)
        out = _address(context, builder, kinds[7], out, out_at)
        integers = ir.VectorType(_I32, 16)
        total = cgutils.alloca_once_value(builder, _many(_F32, 0.0))
        scale, top = spread(builder, scale), builder.fneg(spread(builder, top))

        def fma(a, b, c):
            a, b, c = (x if isinstance(x, ir.Instruction) else _many(_F32, x) for x in (a, b, c))
            return call_llvm(builder, "llvm.fma.v16f32", _VECTOR, a, b, c)

        for index, place, live in _each_16(builder, base, begin, end, width):
            x = fma(builder.load(place, align=4), scale, top)
            x = call_llvm(builder, "llvm.maxnum.v16f32", _VECTOR, x, _many(_F32, -87.0))
            # the nearest whole power of two, as a number and in the low bits of `shifted`
            shifted = fma(x, _LOG2_E, _ROUNDING)
            whole = builder.fsub(shifted, _many(_F32, _ROUNDING))
            x = fma(whole, 2.12194440e-4, fma(whole, -0.693359375, x))
            y = fma(x, _POWERS[0], _POWERS[1])
            for power in _POWERS[2:]:
                y = fma(y, x, power)
            exponent = builder.sub(
                builder.bitcast(shifted, integers), _many(_I32, _ROUNDING_BITS - 127)
            )
            exponent = builder.bitcast(builder.shl(exponent, _many(_I32, 23)), _VECTOR)
            y = builder.select(live, builder.fmul(y, exponent), _many(_F32, 0.0))
            builder.store(builder.fadd(builder.load(total), y), total)
            target = builder.gep(out, [index])
            if kinds[7].dtype == types.int16:
                bits = builder.bitcast(y, integers)
                odd = builder.and_(builder.lshr(bits, _many(_I32, 16)), _many(_I32, 1))
                bits = builder.add(builder.add(bits, odd), _many(_I32, 0x7FFF))
                y = builder.trunc(
                    builder.lshr(bits, _many(_I32, 16)), ir.VectorType(ir.IntType(16), 16)
                )
            builder.store(y, builder.bitcast(target, y.type.as_pointer()), align=2)
        lanes = [
            builder.extract_element(builder.load(total), ir.Constant(_I32, i)) for i in range(16)
        ]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [builder.fadd(a, b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        return lanes[0]

    index = types.int64
    signature = types.float32(
        array, index, index, index, index, types.float32, types.float32, out, index
    )
    return signature, codegen


@intrinsic
def add_rows(typingctx, line, at, width, factor, rows, seen, weights, first, count, by):
    """line = (factor * line + sum of weights[i] * rows[seen[i]]) * by, i from `first` on, in order.

    line: `width` numbers at `at`, a multiple of 32; rows: flat, `width` numbers each.
    """

    def codegen(context, builder, signature, args):
        kinds = signature.args
        line, at, width, factor, rows, seen, weights, first, count, by = args
        line = _address(context, builder, kinds[0], line, at)
        rows = _address(context, builder, kinds[4], rows, ir.Constant(_I64, 0))
        seen = _address(context, builder, kinds[5], seen, first)
        weights = _address(context, builder, kinds[6], weights, first)
        factor, by = spread(builder, factor), spread(builder, by)
        vector, sixteen = _VECTOR.as_pointer(), ir.Constant(_I64, 16)
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(2)]
        with cgutils.for_range_slice(
            builder, ir.Constant(_I64, 0), width, ir.Constant(_I64, 32), inc=True
        ) as (column, _):
            places = [builder.gep(line, [column])]
            places.append(builder.gep(places[0], [sixteen]))
            places = [builder.bitcast(place, vector) for place in places]
            for total, place in zip(sums, places, strict=True):
                builder.store(builder.fmul(builder.load(place, align=4), factor), total)
            with cgutils.for_range(builder, count) as loop:
                row = builder.sext(builder.load(builder.gep(seen, [loop.index])), _I64)
                value = builder.gep(rows, [builder.add(builder.mul(row, width), column)])
                weight = spread(builder, builder.load(builder.gep(weights, [loop.index])))
                for half, total in enumerate(sums):
                    part = builder.gep(value, [ir.Constant(_I64, 16 * half)])
                    part = builder.load(builder.bitcast(part, vector), align=4)
                    part = call_llvm(
                        builder, "llvm.fma.v16f32", _VECTOR, weight, part, builder.load(total)
                    )
                    builder.store(part, total)
            for total, place in zip(sums, places, strict=True):
                builder.store(builder.fmul(builder.load(total), by), place, align=4)
        return context.get_dummy_value()

    index, number = types.int64, types.float32
    signature = types.void(line, index, index, number, rows, seen, weights, index, index, number)
    return signature, codegen


def has_tiles() -> bool:
    """Whether code for matrix registers is compiled here; without them it is left out."""
    features = config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features().flatten() if config.CPU_NAME is None else ""
    return "+amx-bf16" in features.split(",")


def _with_tiles(builder: Any, name: str, *args: Any) -> None:
    if has_tiles():
        call_llvm(builder, name, ir.VoidType(), *args)


def _tile(number: Any) -> ir.Constant:
    return ir.Constant(_I8, number.literal_value)


@intrinsic
def tile_config(typingctx, array, offset):
    """Shape the tile registers by 64 bytes of a flat array."""

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args[0], *args)
        _with_tiles(builder, "llvm.x86.ldtilecfg", builder.bitcast(at, cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def tile_release(typingctx):
    """Leave the tile registers as they are found in a new thread."""

    def codegen(context, builder, signature, args):
        _with_tiles(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def tile_zero(typingctx, tile):
    """Clear a tile register."""

    def codegen(context, builder, signature, args):
        _with_tiles(builder, "llvm.x86.tilezero", _tile(tile))
        return context.get_dummy_value()

    return types.void(tile), codegen


def _tile_memory(name: str, tile: Any, array: Any) -> Any:
    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args[1], args[1], args[2])
        at = builder.bitcast(at, cgutils.voidptr_t)
        _with_tiles(builder, name, _tile(tile), at, args[3])
        return context.get_dummy_value()

    return types.void(tile, array, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def tile_load(typingctx, tile, array, offset, stride):
    """Fill a tile register from a flat array, rows `stride` bytes apart."""
    return _tile_memory("llvm.x86.tileloadd64", tile, array)


@intrinsic(prefer_literal=True)
def tile_store(typingctx, tile, array, offset, stride):
    """Write a tile register to a flat array, rows `stride` bytes apart."""
    return _tile_memory("llvm.x86.tilestored64", tile, array)


@intrinsic(prefer_literal=True)
def tile_multiply(typingctx, c, a, b):
    """C += A @ B: bfloat16 products, summed in float32."""

    def codegen(context, builder, signature, args):
        _with_tiles(builder, "llvm.x86.tdpbf16ps", _tile(c), _tile(a), _tile(b))
        return context.get_dummy_value()

    return types.void(c, a, b), codegen
