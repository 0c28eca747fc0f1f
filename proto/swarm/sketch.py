"""Sketches of long vectors, whose distance estimates that of the vectors (CountSketch, Charikar et al. 2002).

Averages that hivemind gives to two peers differ by rounding even if nothing went wrong, because each peer
adds a difference to its own values: no hash of them is ever equal.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WIDTH = 256
_SEED = 20160412


def sketch(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `WIDTH` sums of the elements with random signs, and the norm of the vector; float32."""
    buckets, signs = _hashes(vector.size)
    sums = np.bincount(buckets, weights=vector * signs, minlength=WIDTH)
    return np.append(sums, np.linalg.norm(vector)).astype("<f4")


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the estimated distance of two vectors by their sketches, relative to the norm of the first.

    Infinite if a sketch is none.
    """
    if a.shape != b.shape or not np.isfinite(b).all():
        return float("inf")
    norm = max(float(a[-1]), 1e-30)
    return float(np.linalg.norm(a[:-1].astype(np.float64) - b[:-1]) / norm)


@lru_cache(maxsize=1)
def _hashes(size: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    random = np.random.Generator(np.random.Philox(_SEED))
    buckets = random.integers(0, WIDTH, size, dtype=np.int16)
    return buckets, (random.integers(0, 2, size, dtype=np.int8) * 2 - 1).astype(np.float32)
