"""Many unsigned numbers as variable-length bytes: seven bits each, least significant first (LEB128)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint64]

_MORE = 128


def encode(numbers: NDArray[Any]) -> Bytes:
    """Return the bytes of all numbers, one after the other."""
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


def decode(data: Bytes, count: int, bits: int) -> Numbers:
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
        _check_bits(part, bits - 7 * place)
        numbers[at] |= part << np.uint64(7 * place)
        at = at[sizes[at] > place + 1]
    return numbers


def _check_bits(part: Numbers, left: int) -> None:
    """Raise ValueError if seven bits of a number reach beyond the `left` ones that it may still have."""
    if left < 7 and int(part.max()) >> left:
        raise ValueError("a number is too large")
