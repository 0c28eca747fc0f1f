"""Values of a unit as bit patterns: what is hashed, compared and sent. NumPy only.

A pattern is an unsigned number of the dtype's size, little-endian, so that NaN, -0.0 and infinities are
values like any other.
"""

import hashlib
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
