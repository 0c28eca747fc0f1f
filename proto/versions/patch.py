"""Bit patterns of a unit, and transfers: bytes that make a unit from that of another version, or of nothing.

A transfer is a row of segments, each of `SEGMENT` elements (the last one of the rest). A segment begins with
one byte, its kind:

    0 raw      the patterns
    1 planes   for each byte of a pattern, least significant first: length (4 bytes), and these bytes of all
               elements with zlib; without it if the length is the number of elements
    2 patch    number of changed elements; for gaps and for differences, length before and after zlib (4 bytes
               each); the gaps; the differences. Equal lengths: without zlib

Gaps are the numbers of unchanged elements before each changed one. A difference is pattern minus base
pattern, modulo the size of a pattern, as a signed number z: 2z - 1 if it is positive, -2z - 2 if it is
negative. Both are LEB128 (`encode_numbers`), and fixed numbers are little-endian. The shortest kind is taken,
by measured size.

A pattern is an unsigned number of the dtype's size, little-endian, so that NaN, -0.0 and infinities are
values like any other.
"""

import hashlib
import struct
import zlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aedit.proto.codecs import to_bf16

Patterns: TypeAlias = NDArray[Any]
"""One-dimensional, of one of the types in `PATTERNS`."""

PATTERNS: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype("<u2"),
    "fp32": np.dtype("<u4"),
    "fp64": np.dtype("<u8"),
}
"""Type of the patterns of each dtype that a policy version can have."""

_ROUNDED_AT_A_TIME = 2**20


def patterns(values: NDArray[Any], dtype: str) -> Patterns:
    """Return the bit patterns of `values` in `dtype`: a new array for bf16, else a view where possible.

    Args:
        values: fp32 for bf16 (rounded to nearest, ties to even, as in torch) and for fp32; fp64 for fp64; any
            shape.
        dtype: bf16, fp32 or fp64.
    """
    wanted = np.float64 if dtype == "fp64" else np.float32
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype != wanted:
        raise ValueError(f"values are {flat.dtype}, expected {np.dtype(wanted)} for {dtype}")
    if dtype != "bf16":
        return flat.view(PATTERNS[dtype])
    out = np.empty(flat.size, PATTERNS["bf16"])
    for start in range(0, flat.size, _ROUNDED_AT_A_TIME):
        part = flat[start : start + _ROUNDED_AT_A_TIME]
        rounded = to_bf16(part.view(np.uint32))
        # Rounding would make infinity of a NaN whose upper bits are few.
        out[start : start + part.size] = np.where(np.isnan(part), _QUIET_NAN, rounded)
    return out


_QUIET_NAN = 0x7FC0
"""bf16 of every NaN."""


def unit_hash(values: Patterns) -> bytes:
    """Return the SHA-256 of a unit's patterns."""
    return hashlib.sha256(values.data if values.size else b"").digest()


Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint64]

_MORE = 128


def encode_numbers(numbers: NDArray[Any]) -> Bytes:
    """Return the bytes of all numbers: seven bits each, least significant first (LEB128)."""
    sizes = np.ones(numbers.size, np.int64)
    large = np.flatnonzero(numbers >= _MORE)
    if not large.size:
        return numbers.astype(np.uint8)
    rest = numbers[large].astype(np.uint64) >> np.uint64(7)
    groups = []
    while large.size:
        groups.append((large, rest))
        sizes[large] += 1
        more = np.flatnonzero(rest >= _MORE)
        large, rest = large[more], rest[more] >> np.uint64(7)
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    out[starts] = numbers.astype(np.uint8) & 127
    for place, (at, part) in enumerate(groups, 1):
        out[starts[at] + place - 1] |= _MORE
        out[starts[at] + place] = part.astype(np.uint8) & 127
    return out


def decode_numbers(data: Bytes, count: int, bits: int) -> Numbers:
    """Return `count` numbers below 2**bits, of which `data` is made.

    Raises ValueError if they are fewer, more or larger.
    """
    last = np.flatnonzero(data < _MORE)
    if last.size != count or (data.size and data[-1] >= _MORE):
        raise ValueError(f"{last.size} numbers in {data.size} bytes, expected {count}")
    first = np.concatenate([[0], last[:-1] + 1]) if count else last
    sizes = last - first + 1
    longest = -(-bits // 7)
    if count and int(sizes.max()) > longest:
        raise ValueError(f"a number of {int(sizes.max())} bytes, at most {longest} are allowed")
    numbers: Numbers = (data[first] & 127).astype(np.uint64)
    at = np.flatnonzero(sizes > 1)
    for place in range(1, longest):
        if not at.size:
            break
        part = (data[first[at] + place] & 127).astype(np.uint64)
        left = bits - 7 * place
        if left < 7 and int(part.max()) >> left:
            raise ValueError("a number is too large")
        numbers[at] |= part << np.uint64(7 * place)
        at = at[sizes[at] > place + 1]
    return numbers


SEGMENT = 2**20
"""Elements of a segment: bounds the memory that is needed beside the unit."""
ENCODING = "segments"
"""Name of this format in a `TransferHead`."""

_RAW, _PLANES, _PATCH = range(3)
_LENGTH = struct.Struct("<I")
_PATCH_HEAD = struct.Struct("<5I")
_GAP_BITS = 20
_WORTH_A_TRY = 0.3
"""Share of the raw size from which on a patch may be longer than the planes."""


def most_bytes(num_elements: int, itemsize: int) -> int:
    """Return the largest size of a transfer of so many elements: no segment needs more than planes do."""
    return num_elements * itemsize + -(-num_elements // SEGMENT) * (1 + _LENGTH.size * itemsize)


def encode_transfer(values: Patterns, base: Patterns | None = None) -> tuple[bytes, bool]:
    """Return a transfer of `values`, and whether it needs `base`.

    Args:
        values: Patterns of the unit.
        base: Patterns that the receiver has; None: it has none.
    """
    parts, needs_base = [], False
    for start in range(0, values.size, SEGMENT):
        segment = values[start : start + SEGMENT]
        choices = [] if base is None else [_patch(segment, base[start : start + SEGMENT])]
        if not choices or len(choices[0]) > _WORTH_A_TRY * segment.nbytes:
            choices += [_planes(segment), bytes([_RAW]) + segment.tobytes()]
        parts.append(min(choices, key=len))
        needs_base |= parts[-1][0] == _PATCH
    return b"".join(parts), needs_base


def decode_transfer(transfer: memoryview, base: Patterns | None, out: Patterns) -> None:
    """Write the unit that `transfer` makes from `base` to `out`, which may not be `base`.

    No more memory is allocated than a segment of `out` warrants. Raises ValueError for anything that
    `encode_transfer` does not write; `out` is then undefined.
    """
    data, at = transfer.cast("B"), 0
    for start in range(0, out.size, SEGMENT):
        segment = out[start : start + SEGMENT]
        (kind,) = _cut(data, at, 1)
        at += 1
        if kind == _RAW:
            segment[:] = np.frombuffer(_cut(data, at, segment.nbytes), out.dtype)
            at += segment.nbytes
        elif kind == _PLANES:
            at = _read_planes(data, at, segment)
        elif kind == _PATCH and base is not None:
            at = _read_patch(data, at, base[start : start + SEGMENT], segment)
        else:
            raise ValueError(f"a segment of kind {kind}" + " without a base" * (kind == _PATCH))
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes follow the last segment")


def _patch(values: Patterns, base: Patterns) -> bytes:
    places = np.flatnonzero(values != base)
    gaps = encode_numbers(np.diff(places, prepend=-1) - 1)
    signed = (values[places] - base[places]).view(f"<i{values.itemsize}")
    zigzag = ((signed << 1) ^ (signed >> (8 * values.itemsize - 1))).view(values.dtype)
    differences = encode_numbers(zigzag - values.dtype.type(1))
    packed = [_packed(gaps), _packed(differences)]
    head = _PATCH_HEAD.pack(places.size, gaps.size, len(packed[0]), differences.size, len(packed[1]))
    return b"".join((bytes([_PATCH]), head, *packed))


def _read_patch(data: memoryview, at: int, base: Patterns, out: Patterns) -> int:
    head = _PATCH_HEAD.unpack(_cut(data, at, _PATCH_HEAD.size))
    count, at = head[0], at + _PATCH_HEAD.size
    if count > out.size:
        raise ValueError(f"{count} changed elements of {out.size}")
    bits = 8 * out.itemsize
    numbers = []
    for (size, stored), width in zip((head[1:3], head[3:5]), (_GAP_BITS, bits), strict=True):
        if not count <= size <= count * -(-width // 7):
            raise ValueError(f"{size} bytes for {count} numbers of {width} bits")
        raw = np.frombuffer(_unpacked(_cut(data, at, stored), size), np.uint8)
        numbers.append(decode_numbers(raw, count, width))
        at += stored
    places = np.cumsum(numbers[0].astype(np.int64) + 1) - 1
    if count and int(places[-1]) >= out.size:
        raise ValueError(f"place {int(places[-1])} of {out.size}")
    if count and int(numbers[1].max()) == 2**bits - 1:
        raise ValueError("a difference is too large")
    zigzag = numbers[1] + np.uint64(1)
    signed = (zigzag >> np.uint64(1)) ^ (np.uint64(0) - (zigzag & np.uint64(1)))
    out[:] = base
    out[places] += signed.astype(out.dtype)
    return at


def _planes(values: Patterns) -> bytes:
    parts = [bytes([_PLANES])]
    for plane in values.view(np.uint8).reshape(-1, values.itemsize).T:
        packed = _packed(np.ascontiguousarray(plane))
        parts += (_LENGTH.pack(len(packed)), packed)
    return b"".join(parts)


def _read_planes(data: memoryview, at: int, out: Patterns) -> int:
    for plane in out.view(np.uint8).reshape(-1, out.itemsize).T:
        (stored,) = _LENGTH.unpack(_cut(data, at, _LENGTH.size))
        at += _LENGTH.size
        plane[:] = np.frombuffer(_unpacked(_cut(data, at, stored), out.size), np.uint8)
        at += stored
    return at


def _packed(raw: Bytes) -> bytes:
    """Return `raw` with zlib, or as it is if that is not longer.

    Huffman codes alone: faster than matches and, for these numbers, shorter.
    """
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(raw.data if raw.size else b"") + packer.flush()
    return packed if len(packed) < raw.size else raw.tobytes()


def _unpacked(stored: memoryview, size: int) -> bytes | memoryview:
    """Return the `size` bytes that `stored` holds. Never allocates more than that."""
    if stored.nbytes == size:
        return stored
    if stored.nbytes > size:
        raise ValueError(f"{stored.nbytes} bytes of zlib for {size} bytes")
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(stored, size + 1)
    except zlib.error as error:
        raise ValueError(f"not zlib: {error}") from error
    if len(raw) != size or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"zlib of another length than {size} bytes")
    return raw


def _cut(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > data.nbytes:
        raise ValueError(f"the transfer ends at byte {data.nbytes}, within a segment")
    return data[at : at + size]
