"""Merge many pseudo-gradients into one, slice by slice, so that only the result is held whole.

Pushes are taken in the order of their nodes, whatever order they arrive in, so that the same pushes give the
same bits. A push of weight 0 is not read: `0 * nan` is `nan`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules.records import Array, ArrayValues, MergePart, Push, Vector
from aedit.types import TensorLayout, UnitLayout, imported

SLICE = 2**16
"""Elements worked on at a time: what a core keeps in its cache. A multiple of 4096, as `Values` wants it."""

GRAIN = 4096
THIRD = 1 / 3

AGREEMENT = 2.0
"""Standard deviations of the cosine of unrelated directions, beyond which directions agree."""

NOTHING = 1e-30
"""A norm below which there is no direction."""

Weighted = Sequence[tuple[Push, MergePart]]


def merge(parts: Weighted, layout: UnitLayout, rule: str, cut: float = THIRD) -> Vector:
    """Return sum(w s x) / sum(w), or what `rule` computes instead, as a new fp32 array.

    w >= 0 are weights and s are scales, one of each per push x. `rda` (arXiv:2604.21428): for each tensor of
    two or more dimensions sum(w |s x|) / sum(w) times the direction of sum(w x / |x|); the mean for all other
    tensors, and where directions do not agree: a sum of unrelated directions is short with good reason.
    `trimmed`: for each element the weighted mean without the share `cut` of the values at either end.
    `median`: for each element the value in the middle, or the weighted mean of the two. The others are in
    `BY_PRODUCTS`; `cut` is the share of liars that `multi-krum` reckons with. Any other `rule` is a function
    by import path, called with the parts that have weight, in the order of their nodes, and the layout.

    Raises ValueError if no push has weight, or if that function cannot be imported or returns something else.
    """
    parts = sorted(
        (pair for pair in parts if pair[1].weight > 0), key=lambda pair: (pair[1].node, pair[1].seq)
    )
    if not parts:
        raise ValueError("nothing to merge: every weight is 0")
    match rule:
        case "mean":
            return _weighted_sum(parts, layout.numel, _shares(parts))
        case "rda":
            return _rda(parts, layout)
        case "trimmed":
            return _trimmed(parts, layout.numel, _count(len(parts), cut))
        case "median":
            return _trimmed(parts, layout.numel, (len(parts) - 1) // 2)
        case name if name in BY_PRODUCTS:
            w_N = np.array([part.weight for _, part in parts])
            a_N = BY_PRODUCTS[name](_products(parts, layout.numel), w_N, _count(len(parts), cut))
            scale_N = np.array([part.scale for _, part in parts])
            return _weighted_sum(parts, layout.numel, (a_N * scale_N).astype(np.float32))
        case path:
            return _checked(imported(path, "hub.merge")(parts, layout), path, layout.numel)


def try_merge(path: str) -> None:
    """Merge one push and then three by the rule `path`, before a run relies on it.

    Raises ValueError if it returns something else than finite numbers, or other ones the second time, as a
    restart and a standby call it again. Errors of its own pass.
    """
    layout = UnitLayout("unit", (TensorLayout("weight", (3, 2)), TensorLayout("bias", (2,))))
    for num in (1, 3):
        vectors = [np.linspace(-node, 1, layout.numel, dtype=np.float32) for node in range(num)]
        facts = {"unit": 0, "seq": 1, "base": 1, "steps": 1, "tokens": 1, "norms": (1.0, 1.0)}
        pushes = [Push(node=node, values=ArrayValues(x), **facts) for node, x in enumerate(vectors)]  # type: ignore[arg-type]
        parts = [(push, MergePart(push.node, push.seq, weight=1 / num)) for push in pushes]
        first, second = merge(parts, layout, path), merge(parts, layout, path)
        if not np.isfinite(first).all():
            raise ValueError(f"{path} returned numbers that are not finite")
        if first.tobytes() != second.tobytes():
            raise ValueError(f"{path} returned other numbers for the same pushes")


def _count(num: int, cut: float) -> int:
    """Return the share `cut` of `num` pushes, rounded down, and fewer than half of them."""
    return min(int(num * cut + 1e-9), (num - 1) // 2)


def _products(parts: Weighted, numel: int) -> NDArray[np.float64]:
    """Return the inner products of the scaled pushes, [N, N], summed in float64 without BLAS."""
    G_NN = np.zeros((len(parts), len(parts)))
    for start, stop in unit_slices(numel):
        pieces = [push.values.read(start, stop).astype(np.float64) * part.scale for push, part in parts]
        for i, one in enumerate(pieces):
            for j, other in enumerate(pieces[: i + 1]):
                G_NN[i, j] += (one * other).sum()
    return G_NN + np.tril(G_NN, -1).T


def _checked(merged: Vector, path: str, numel: int) -> Vector:
    found = (getattr(merged, "shape", None), getattr(merged, "dtype", None))
    if found != ((numel,), np.float32):
        raise ValueError(f"hub.merge: {path} returned {found}, expected a float32 array of {numel} elements")
    return merged


def unit_slices(numel: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each slice of a unit."""
    return ((start, min(start + SLICE, numel)) for start in range(0, numel, SLICE))


def _shares(parts: Weighted) -> NDArray[np.float32]:
    """Return w s / sum(w), one per part."""
    w_N = np.array([part.weight for _, part in parts])
    scale_N = np.array([part.scale for _, part in parts])
    shares_N: NDArray[np.float32] = (w_N * scale_N / w_N.sum()).astype(np.float32)
    return shares_N


def _weighted_sum(parts: Weighted, numel: int, shares_N: NDArray[np.float32]) -> Vector:
    total = np.empty(numel, np.float32)
    for start, stop in unit_slices(numel):
        _add(parts, shares_N, (start, stop), total[start:stop])
    return total


def _add(parts: Weighted, shares_N: NDArray[np.float32], at: tuple[int, int], into: Vector) -> None:
    into[:] = 0
    for (push, _), share in zip(parts, shares_N, strict=True):
        values = push.values.read(*at)
        values *= share
        into += values


# --- RDA


def _rda(parts: Weighted, layout: UnitLayout) -> Vector:
    """Return the merge by `rda`. The second of two passes is over the result alone.

    The norms of the merged tensors are known from the pushes.
    """
    ends = np.cumsum([0, *(tensor.numel for tensor in layout.tensors)])
    shares_NT = _direction_shares(parts, layout)
    total = np.empty(layout.numel, np.float32)
    for start, stop in unit_slices(layout.numel):
        total[start:stop] = 0
        first, last = np.searchsorted(ends, [start, stop - 1], side="right") - 1
        for (push, _), shares_T in zip(parts, shares_NT, strict=True):
            values = push.values.read(start, stop)
            for t in range(first, last + 1):
                values[max(0, ends[t] - start) : ends[t + 1] - start] *= shares_T[t]
            total[start:stop] += values
    _lengthen(total, parts, layout, ends)
    return total


def _direction_shares(parts: Weighted, layout: UnitLayout) -> NDArray[np.float32]:
    """Return the factor of each part's tensors: w / sum(w) / |x|, or w s / sum(w) for the plain mean."""
    w_N1 = np.array([[part.weight] for _, part in parts])
    norms_NT = np.array([push.norms for push, _ in parts])
    matrix_T = np.array([len(tensor.shape) >= 2 for tensor in layout.tensors])
    directions_NT = np.where(norms_NT > NOTHING, w_N1 / w_N1.sum() / np.maximum(norms_NT, NOTHING), 0.0)
    return np.where(matrix_T, directions_NT, _shares(parts)[:, None]).astype(np.float32)


def _lengthen(total: Vector, parts: Weighted, layout: UnitLayout, ends: NDArray[np.int64]) -> None:
    """Give each matrix of `total`, so far a mean of directions, its length; in place.

    Where directions do not agree, the plain mean takes its place.
    """
    w_N = np.array([part.weight for _, part in parts])
    scale_N = np.array([part.scale for _, part in parts])
    for t, tensor in enumerate(layout.tensors):
        if len(tensor.shape) < 2:
            continue
        norms_N = np.array([push.norms[t] for push, _ in parts])
        lengths_N = scale_N * norms_N
        piece = total[ends[t] : ends[t + 1]]
        direction = norm(piece)
        if _agree(direction, (w_N * (norms_N > NOTHING)) / w_N.sum(), tensor.numel):
            piece *= np.float32(float((w_N * lengths_N).sum() / w_N.sum()) / direction)
        elif lengths_N.any():
            _mean_of_piece(parts, (int(ends[t]), int(ends[t + 1])), total)


def _agree(length: float, a_N: NDArray[np.float64], numel: int) -> bool:
    """Return whether directions agree beyond chance, from the length of their mean with the weights a.

    length^2 = sum(a_i^2) + sum over pairs of a_i a_j cos_ij: the mean cosine of pairs is above that of
    unrelated directions, which is 0 with a standard deviation of 1 / sqrt(numel).
    """
    own = float((a_N**2).sum())
    pairs = float(a_N.sum() ** 2) - own
    if pairs <= 1e-12:
        return length > 0
    return bool((length**2 - own) / pairs > AGREEMENT / math.sqrt(numel))


def _mean_of_piece(parts: Weighted, at: tuple[int, int], total: Vector) -> None:
    """Write the weighted mean of elements at[0]..at[1] into `total`."""
    begin, end = at
    for start in range(begin - begin % GRAIN, end, SLICE):
        stop = min(start + SLICE, len(total))
        mean = np.empty(stop - start, np.float32)
        _add(parts, _shares(parts), (start, stop), mean)
        low, high = max(start, begin), min(stop, end)
        total[low:high] = mean[low - start : high - start]


def norm(vector: Vector) -> float:
    """Return the Euclidean norm, summed in double precision: the same bits with any BLAS."""
    total = 0.0
    for start, stop in unit_slices(len(vector)):
        piece = vector[start:stop].astype(np.float64)
        total += float(np.square(piece, out=piece).sum())
    return float(np.sqrt(total))


# --- trimmed mean


def _trimmed(parts: Weighted, numel: int, cut: int) -> Vector:
    """Return for each element the weighted mean without `cut` values at either end."""
    total = np.empty(numel, np.float32)
    w_N1 = np.array([[part.weight] for _, part in parts], np.float32)
    for start, stop in unit_slices(numel):
        values_NE = np.stack([push.values.read(start, stop) for push, _ in parts])
        values_NE *= np.array([[part.scale] for _, part in parts], np.float32)
        order_NE = np.argsort(values_NE, axis=0, kind="stable")[cut : len(parts) - cut]
        kept_NE = np.take_along_axis(values_NE, order_NE, axis=0)
        weights_NE = np.take_along_axis(np.broadcast_to(w_N1, values_NE.shape), order_NE, axis=0)
        total[start:stop] = (kept_NE * weights_NE).sum(0) / weights_NE.sum(0)
    return total


# --- merges that a minority of liars cannot move far, in the coordinates of the pushes themselves
#
# Each is sum(a_i x_i) over pushes x_i, where the coefficients a depend on the inner products
# G_ij = <x_i, x_j> alone. So the pushes are read twice, once for G and once for the sum, and everything
# between is arithmetic on N numbers in float64, without BLAS: the same bits on every replay.

SMOOTHING = 1e-6
"""Shortest distance, as a share of the median length, by which Weiszfeld's iteration divides."""

_ITERATIONS = 64
_CLIPS = 3
"""Iterations of centered clipping; the paper uses one to three."""


def geometric_median(G_NN: Array, w_N: Array, liars: int) -> Array:
    """Return the coefficients of the point with the least sum of weighted distances to all pushes.

    Smoothed Weiszfeld iteration (arXiv:1912.13445) from the weighted mean: v <- sum(b_i x_i) / sum(b_i) with
    b_i = w_i / max(nu, |x_i - v|). Holds against liars of less than half of the weight; `liars` is not used.
    """
    nu = max(SMOOTHING * float(np.sqrt(np.median(np.diag(G_NN)))), 1e-300)
    a_N = _normed(w_N)
    for _ in range(_ITERATIONS):
        b_N = w_N / np.maximum(np.sqrt(_squares(G_NN, a_N)), nu)
        a_N = _normed(b_N)
    return a_N


def multi_krum(G_NN: Array, w_N: Array, liars: int) -> Array:
    """Return the weighted mean of the n - f pushes that are closest to their n - f - 2 nearest others.

    Blanchard et al. 2017 (arXiv:1703.02757), which asks for n >= 2 f + 3: f = `liars` is lowered to that.
    """
    n = len(w_N)
    f = max(0, min(liars, (n - 3) // 2))
    if n < 3:
        return _normed(w_N)
    square_NN = np.maximum(np.diag(G_NN)[:, None] + np.diag(G_NN)[None, :] - 2 * G_NN, 0.0)
    near_NN = np.sort(square_NN + np.diag(np.full(n, np.inf)), axis=1)[:, : max(1, n - f - 2)]
    chosen_N = np.argsort(near_NN.sum(1), kind="stable")[: n - f]
    a_N = np.zeros(n)
    a_N[chosen_N] = w_N[chosen_N]
    return _normed(a_N if a_N.any() else w_N)


def centered_clip(G_NN: Array, w_N: Array, liars: int) -> Array:
    """Return the coefficients of v <- v + sum(w_i (x_i - v) min(1, tau / |x_i - v|)) after three iterations.

    Karimireddy et al. 2021 (arXiv:2012.10333), from v = 0: no movement. The radius tau is the median distance
    to v, so that it needs no tuning. A liar moves v by its weight times that; `liars` is not used.
    """
    w_N = _normed(w_N)
    a_N = np.zeros(len(w_N))
    for _ in range(_CLIPS):
        far_N = np.sqrt(_squares(G_NN, a_N))
        c_N = w_N * np.minimum(1.0, np.median(far_N) / np.maximum(far_N, 1e-300))
        a_N = a_N * (1 - c_N.sum()) + c_N
    return a_N


def _normed(w_N: Array) -> Array:
    shares_N: Array = w_N / w_N.sum()
    return shares_N


def _squares(G_NN: Array, a_N: Array) -> Array:
    """Return |x_i - sum(a_j x_j)|^2 of each push."""
    Ga_N = (G_NN * a_N).sum(1)
    squares_N: Array = np.maximum(np.diag(G_NN) - 2 * Ga_N + (a_N * Ga_N).sum(), 0.0)
    return squares_N


Coefficients = Callable[[Array, Array, int], Array]

BY_PRODUCTS: dict[str, Coefficients] = {
    "geometric-median": geometric_median,
    "multi-krum": multi_krum,
    "centered-clip": centered_clip,
}
"""Merge rules that need only the inner products of the pushes, by name."""
