# SPDX-License-Identifier: Apache-2.0
"""Clear machine code that a Hopper GPU or the questions do not run, so that libraries pack small.

    shrink.py LIBRARY.so ...

Sizes and offsets stay as they are: the code of other architectures, all PTX, and FlashAttention 3's
kernels for other heads and types become zeros in the file. A kernel that was cleared fails when it
is launched.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_MAGIC, _HEADER = struct.pack("<I", 0xBA55ED50), 16
_CUBIN, _HOPPER = 2, 90
# Head dimension and type of a FlashAttention 3 kernel, in the names that its machine code holds.
_FLASH = re.compile(rb"ELi(\d+)ENS_\d+(bfloat16_t|half_t|float_e4m3_t)EfNS_4arch4Sm90")
_KEPT = {(64, b"bfloat16_t"), (128, b"bfloat16_t"), (256, b"bfloat16_t"), (128, b"float_e4m3_t")}


def parts(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(kind, architecture, begin, end) of all code in a library's fat binaries."""
    at = 0
    while (at := data.find(_MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, header) != (1, _HEADER):
            at += 4
            continue
        place, end = at + header, at + header + size
        while place < end:
            kind, _, own, length = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            yield kind, architecture, place + own, place + own + length
            place += own + length
        at = end


def wanted(kind: int, architecture: int, code: bytes) -> bool:
    """Whether the questions may run it."""
    found = {(int(dim), dtype) for dim, dtype in _FLASH.findall(code)}
    return (kind, architecture) == (_CUBIN, _HOPPER) and (not found or bool(found & _KEPT))


def shrink(data: bytes) -> tuple[bytes, int]:
    """The library with zeros in place of what is not wanted, and how many bytes that was."""
    made, cleared = bytearray(data), 0
    for kind, architecture, begin, end in parts(data):
        if not wanted(kind, architecture, data[begin:end]):
            made[begin:end] = bytes(end - begin)
            cleared += end - begin
    return bytes(made), cleared


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        small, number = shrink(path.read_bytes())
        path.write_bytes(small)
        print(f"{path.name}: {number / 1e6:.0f} of {len(small) / 1e6:.0f} MB cleared")
