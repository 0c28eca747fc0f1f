"""HeLoCo: late pseudo-gradients are turned towards the outer momentum (arXiv:2606.00271).

Per block, a tensor of the unit: D is the pseudo-gradient, m the momentum, u = D / |D|, v = m / |m|, c = u v.
A D that agrees with m is kept, one that contradicts it loses a part of what contradicts it, and one in
between is turned towards m at its own length. Every case is a D + b m, with coefficients from three inner
products. The paper's constants were not at hand: those below are a choice.
"""

import math
from collections.abc import Sequence

import numpy as np

from aedit.async_sgd.rules.records import Vector
from aedit.types import TensorLayout

AGREES = 0.5
"""Cosine from which on a pseudo-gradient is kept as it is (c_ok)."""

MOST = 1.0
"""Share of the contradicting part that is taken away at most (beta_max); 1 leaves none of it."""

CONFIDENCE = 1.0
"""Weight of the momentum's length against that of the pseudo-gradient (kappa)."""


def coefficients(DD: float, mm: float, Dm: float, strength: float) -> tuple[float, float]:
    """Return (a, b): the corrected pseudo-gradient of a block is a D + b m.

    DD, mm, Dm: inner products. strength: k_s and k_d of the paper. Without a direction of either: (1, 0).
    """
    if not (DD > 0 and mm > 0 and math.isfinite(DD) and math.isfinite(mm)):
        return 1.0, 0.0
    d, n = math.sqrt(DD), math.sqrt(mm)
    c = max(-1.0, min(1.0, Dm / (d * n)))
    confidence = d / (d + CONFIDENCE * n)
    if c >= AGREES:
        return 1.0, 0.0
    if c < 0:
        beta = min(strength * -c * confidence, MOST)
        return 1.0, -beta * c * d / n
    l = min(strength * (1 - c) * confidence, 1.0)  # noqa: E741 - the paper's letter
    length = math.sqrt((1 - l) ** 2 + l**2 + 2 * l * (1 - l) * c)
    return (1 - l) / length, d * l / (n * length)


def correct(gradient: Vector, momentum: Vector, tensors: Sequence[TensorLayout], strength: float) -> None:
    """Replace the pseudo-gradient of a unit by the corrected one, in place."""
    start = 0
    for tensor in tensors:
        D, m = gradient[start : start + tensor.numel], momentum[start : start + tensor.numel]
        start += tensor.numel
        DD, mm, Dm = (float((x.astype(np.float64) * y).sum()) for x, y in ((D, D), (m, m), (D, m)))
        a, b = coefficients(DD, mm, Dm, strength)
        if b:
            D *= np.float32(a)
            D += np.float32(b) * m
