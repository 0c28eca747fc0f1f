"""Weights of pseudo-gradients by their norms and steps (EDiT, arXiv:2412.07210, section 3.2).

Pure functions in the paper's letters. Shapes: N nodes, L units. G_NL: norms of the pseudo-gradients, inf
where they are distrusted. g_NL: inner steps since the unit's last round.
"""

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules.config import PenaltyConfig

Array = NDArray[np.float64]


def weights(G_NL: Array, g_NL: Array, config: PenaltyConfig) -> Array:
    """Return w_NL: weights that sum to 1 over nodes, or are all 0 for a unit that nobody trusts.

    A node that took no step since the unit's last round weighs 0.
    """
    trusted_NL = np.isfinite(G_NL) & (g_NL > 0)
    score_NL = _score(np.where(trusted_NL, G_NL, 0.0), trusted_NL, config)
    w_NL = _softmax(np.where(trusted_NL, score_NL, -np.inf))
    r = config.step_weight
    g_NL = g_NL * trusted_NL
    mixed_NL: Array = (1 - r) * w_NL + r * g_NL / np.maximum(g_NL.sum(0), 1.0)
    return mixed_NL


def _score(G_NL: Array, trusted_NL: NDArray[np.bool_], config: PenaltyConfig) -> Array:
    match config.weights:
        case "uniform":
            return np.zeros_like(G_NL)
        case "paper":  # eq. 3: softmax(-G); one node takes all when norms are in the tens
            return np.negative(G_NL) / config.temperature
        case "scale-free":
            median_L = np.array([_median(G, at) for G, at in zip(G_NL.T, trusted_NL.T, strict=True)])
            score_NL: Array = (1 - G_NL / np.maximum(median_L, 1e-30)) / config.temperature
            return score_NL


def _median(G_N: Array, trusted_N: NDArray[np.bool_]) -> float:
    return float(np.median(G_N[trusted_N])) if trusted_N.any() else 1.0


def _softmax(score_NL: Array) -> Array:
    """Return the softmax over nodes; a column of -inf becomes 0."""
    top_L = score_NL.max(0, initial=-np.inf)
    e_NL = np.exp(score_NL - np.where(np.isfinite(top_L), top_L, 0.0))
    total_L = e_NL.sum(0)
    return e_NL / np.where(total_L > 0, total_L, 1.0)


def effective_nodes(w_NL: Array) -> Array:
    """Return 1 / sum(w^2) per unit: the number of nodes that the average is effectively over.

    0 without trust.
    """
    squares_L = (w_NL**2).sum(0)
    return np.where(squares_L > 0, 1 / np.maximum(squares_L, 1e-30), 0.0)
