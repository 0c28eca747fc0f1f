"""How much each node's pseudo-gradient counts, and how far the average may go (EDiT, arXiv:2412.07210,
section 3.2).

Pure functions in the paper's letters. Shapes: N nodes, L units.
G_NL: norms of the pseudo-gradients, inf where the node distrusts its own. g_NL: inner steps since the
unit's last round.
"""

import torch
from torch import Tensor

from aedit.async_sgd.rules import penalty
from aedit.async_sgd.rules.config import PenaltyConfig


def weights(G_NL: Tensor, g_NL: Tensor, config: PenaltyConfig) -> Tensor:
    """`async_sgd.penalty.weights` of float64 rows on CPU."""
    return torch.from_numpy(penalty.weights(G_NL.numpy(), g_NL.numpy(), config))


def effective_nodes(w_NL: Tensor) -> Tensor:
    """`async_sgd.penalty.effective_nodes` of float64 rows on CPU."""
    return torch.from_numpy(penalty.effective_nodes(w_NL.numpy()))


def clip_scale(norm: Tensor, clip: float | None) -> Tensor:
    """beta = min(1, phi / ||mean||) (eq. 4), 0-dim like `norm`."""
    if clip is None:
        return torch.ones_like(norm)
    return (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
