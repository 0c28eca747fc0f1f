"""Merges that a minority of liars cannot move far, in the coordinates of the pushes themselves.

Each of these merges is sum(a_i x_i) over pushes x_i, where the coefficients a depend on the inner products
G_ij = <x_i, x_j> alone. So the pushes are read twice, once for G and once for the sum, and everything between
is arithmetic on N numbers in float64, without BLAS: the same bits on every replay. Shapes: N pushes.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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
    a_N = _shares(w_N)
    for _ in range(_ITERATIONS):
        b_N = w_N / np.maximum(np.sqrt(_squares(G_NN, a_N)), nu)
        a_N = _shares(b_N)
    return a_N


def multi_krum(G_NN: Array, w_N: Array, liars: int) -> Array:
    """Return the weighted mean of the n - f pushes that are closest to their n - f - 2 nearest others.

    Blanchard et al. 2017 (arXiv:1703.02757), which asks for n >= 2 f + 3: f = `liars` is lowered to that.
    """
    n = len(w_N)
    f = max(0, min(liars, (n - 3) // 2))
    if n < 3:
        return _shares(w_N)
    square_NN = np.maximum(np.diag(G_NN)[:, None] + np.diag(G_NN)[None, :] - 2 * G_NN, 0.0)
    near_NN = np.sort(square_NN + np.diag(np.full(n, np.inf)), axis=1)[:, : max(1, n - f - 2)]
    chosen_N = np.argsort(near_NN.sum(1), kind="stable")[: n - f]
    a_N = np.zeros(n)
    a_N[chosen_N] = w_N[chosen_N]
    return _shares(a_N if a_N.any() else w_N)


def centered_clip(G_NN: Array, w_N: Array, liars: int) -> Array:
    """Return the coefficients of v <- v + sum(w_i (x_i - v) min(1, tau / |x_i - v|)) after three iterations.

    Karimireddy et al. 2021 (arXiv:2012.10333), from v = 0: no movement. The radius tau is the median distance
    to v, so that it needs no tuning. A liar moves v by its weight times that; `liars` is not used.
    """
    w_N = _shares(w_N)
    a_N = np.zeros(len(w_N))
    for _ in range(_CLIPS):
        far_N = np.sqrt(_squares(G_NN, a_N))
        c_N = w_N * np.minimum(1.0, np.median(far_N) / np.maximum(far_N, 1e-300))
        a_N = a_N * (1 - c_N.sum()) + c_N
    return a_N


def _shares(w_N: Array) -> Array:
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
