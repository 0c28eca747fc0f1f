"""How much each node's pseudo-gradient counts, and how far the average may go (EDiT, arXiv:2412.07210,
section 3.2).

Pure functions in the paper's letters. Shapes: N nodes, L units.
G_NL: norms of the pseudo-gradients, inf where the node distrusts its own. g_NL: inner steps since the
unit's last round.
"""

import torch
from torch import Tensor

from aedit.edit.config import PenaltyConfig


def weights(G_NL: Tensor, g_NL: Tensor, config: PenaltyConfig) -> Tensor:
    """w_NL: weights that sum to 1 over nodes, or are all 0 for a unit that nobody trusts.

    A node that took no step since the unit's last round has nothing to say and weighs 0.
    """
    trusted_NL = G_NL.isfinite() & (g_NL > 0)
    score_NL = _score(G_NL, trusted_NL, config).masked_fill(~trusted_NL, -torch.inf)
    w_NL = torch.softmax(score_NL, dim=0).nan_to_num(0.0)  # a column of -inf is nan: nobody is trusted
    r = config.step_weight
    g_NL = g_NL * trusted_NL
    return (1 - r) * w_NL + r * g_NL / g_NL.sum(0).clamp(min=1.0)


def _score(G_NL: Tensor, trusted_NL: Tensor, config: PenaltyConfig) -> Tensor:
    match config.weights:
        case "uniform":
            return torch.zeros_like(G_NL)
        case "paper":  # eq. 3: softmax(-G); one node takes all when norms are in the tens
            return -G_NL / config.temperature
        case "scale-free":
            median_L = G_NL.masked_fill(~trusted_NL, torch.nan).nanquantile(0.5, dim=0)
            return -(G_NL / median_L.clamp(min=1e-30) - 1) / config.temperature


def effective_nodes(w_NL: Tensor) -> Tensor:
    """1 / sum(w^2) per unit: how many nodes the average is really over; 0 where nobody is trusted."""
    squares_L = (w_NL**2).sum(0)
    return torch.where(squares_L > 0, 1 / squares_L.clamp(min=1e-30), 0.0)


def clip_scale(norm: Tensor, clip: float | None) -> Tensor:
    """beta = min(1, phi / ||mean||) (eq. 4), 0-dim like `norm`."""
    if clip is None:
        return torch.ones_like(norm)
    return (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
