"""Weight of a push among the others of its merge: by claims, EDiT's penalty, and staleness."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules.config import PenaltyConfig, StalenessConfig
from aedit.async_sgd.rules.records import Array, Push

WeightRule = Literal["uniform", "steps", "tokens", "penalty"]

MOST_CLAIM = 8.0
"""Times the median claim of the other nodes: what one node can say of its steps or tokens at most. Honest
nodes of one run differ up to sixfold (arXiv:2401.09135)."""

MOST_SHARE = 0.75
"""Largest share of one node in the weight, or the displacement, of a merge or round of three nodes or more:
that of a node among two others with a sixth of its speed."""


def merge_weights(
    pushes: Sequence[Push], rule: WeightRule, config: PenaltyConfig | None = None
) -> tuple[float, ...]:
    """Return one weight per push, at least 0, not normalised. A push without steps weighs 0.

    `tokens` is tokens^2 / steps (arXiv:2604.21428): who saw more per step counts more. `penalty` is EDiT's
    softmax over norms, with a share by steps, as `config` says (default: its defaults). No push claims more
    than `MOST_CLAIM` times the median of the others, nor has more than `MOST_SHARE` of the weight among
    three or more.
    """
    norms_N = np.array([push_norm(push) for push in pushes])
    steps_N = np.array([float(push.steps) for push in pushes])
    tokens_N = np.array([float(push.tokens) for push in pushes])
    w_N = raw_weights(norms_N, steps_N, tokens_N, rule, config or PenaltyConfig())
    return tuple(limited(w_N, np.isfinite(norms_N) & (steps_N > 0)).tolist())


def raw_weights(
    norms_N: Array, steps_N: Array, tokens_N: Array, rule: WeightRule, config: PenaltyConfig
) -> Array:
    """Return `merge_weights` of pushes with these norms, steps and tokens, all of shape [N]."""
    match rule:
        case "uniform":
            return (steps_N > 0).astype(np.float64)
        case "steps":
            return bounded(steps_N)
        case "tokens":
            if 2 * np.count_nonzero(tokens_N[steps_N > 0]) <= np.count_nonzero(steps_N):
                return bounded(steps_N)  # most say nothing of their tokens: who does must not decide alone
            return bounded(tokens_N**2 / np.where(steps_N > 0, steps_N, 1.0) * (steps_N > 0))
        case "penalty":
            w_N1 = penalty_weights(norms_N[:, None], bounded(steps_N)[:, None], config)
            w_N: Array = w_N1[:, 0]
            return w_N


def bounded(claims_N: Array) -> Array:
    """Return the claims, each at most `MOST_CLAIM` times the median of the others. A claim alone is kept."""
    usual_N = median_of_others(claims_N)
    return np.where(usual_N > 0, np.minimum(claims_N, MOST_CLAIM * usual_N), claims_N)


def limited(w_N: Array, eligible_N: NDArray[np.bool_] | None = None) -> Array:
    """Return the weights, the largest at most `MOST_SHARE` of the sum if three or more are eligible.

    eligible_N: default those above 0. If all but one have vanished in rounding, the others share the rest.
    """
    eligible_N = w_N > 0 if eligible_N is None else eligible_N
    if np.count_nonzero(eligible_N) < 3 or not w_N.any():
        return w_N
    limited_N, top = w_N.copy(), int(w_N.argmax())
    others_N = eligible_N & (np.arange(len(w_N)) != top)
    if not w_N[others_N].any():
        limited_N[others_N] = w_N[top] * (1 - MOST_SHARE) / MOST_SHARE / np.count_nonzero(others_N)
    limited_N[top] = min(w_N[top], limited_N[others_N].sum() * MOST_SHARE / (1 - MOST_SHARE))
    return limited_N


def median_of_others(x_N: Array) -> Array:
    """Return for each finite number the median of all others, or the number itself if there are none."""
    if len(x_N) < 2:
        return x_N
    order_N, num = np.argsort(x_N, kind="stable"), len(x_N) - 1
    low, high, rank_N = (num - 1) // 2, num // 2, np.arange(len(x_N))
    sorted_N = x_N[order_N]
    median_N = np.empty(len(x_N))
    # Without the number of rank r, the others from r on are one place further up.
    median_N[order_N] = (sorted_N[low + (rank_N <= low)] + sorted_N[high + (rank_N <= high)]) / 2
    return median_N


def push_norm(push: Push) -> float:
    """Return the norm of the whole unit's pseudo-gradient.

    Not finite if that of one of its tensors is not.
    """
    return math.hypot(*push.norms)


# --- EDiT's penalty (arXiv:2412.07210, section 3.2)
#
# In the paper's letters. Shapes: N nodes, L units. G_NL: norms of the pseudo-gradients, inf where they are
# distrusted. g_NL: inner steps since the unit's last round.


def penalty_weights(G_NL: Array, g_NL: Array, config: PenaltyConfig) -> Array:
    """Return w_NL: weights that sum to 1 over nodes, or are all 0 for a unit without a trusted node.

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
            columns = zip(G_NL.T, trusted_NL.T, strict=True)
            median_L = np.array([np.median(G_N[at_N]) if at_N.any() else 1.0 for G_N, at_N in columns])
            score_NL: Array = (1 - G_NL / np.maximum(median_L, 1e-30)) / config.temperature
            return score_NL


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


def staleness_factor(config: StalenessConfig, versions: int) -> float:
    """Return the share of a pseudo-gradient that counts, in [0, 1]; 0 means that it is refused.

    versions: anchor versions made since it was measured, s >= 0. The share is 1; (1 + s)^-power
    (arXiv:2401.09135); or exp(-rate s) times a gate of half a cosine (arXiv:2605.09126). All are 0 from the
    cutoff on.
    """
    assert versions >= 0, "measured from an anchor that does not exist yet"
    if versions >= config.cutoff:
        return 0.0
    match config.rule:
        case "constant":
            return 1.0
        case "polynomial":
            return float((1 + versions) ** -config.power)
        case "exponential":
            gate = 0.5 * (1 + math.cos(math.pi * versions / config.cutoff))
            return math.exp(-config.rate * versions) * gate
