"""Detect pseudo-gradient norms of a node that are too large to be believed.

G_L: this node's norms, one per unit (L units), float64 on CPU. Detectors are pure functions: they take a
history and the new norms and return the history with the believed ones added. A distrusted norm is not added,
and NaN or Inf never enters a history; but after `patience` finite outliers in a row the history starts anew
from them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aedit.async_sgd.rules import PenaltyConfig

MIN_SIGMA = 0.1
"""Smallest standard deviation of a log-norm that is believed: with few rounds the estimate can be far too
small."""

RECENT = 5
"""Rounds whose median is the baseline: few, because norms decay."""


class NormHistory(NamedTuple):
    """History of a detector. W: rounds kept, newest last, nan where there is none yet."""

    norms_WL: Tensor
    mean_L: Tensor
    var_L: Tensor
    rounds_L: Tensor
    suspects_L: Tensor
    """Distrusted finite rounds in a row."""

    @staticmethod
    def empty(num_units: int, window: int) -> "NormHistory":
        """Return a history without rounds."""
        # Each a tensor of its own: a checkpoint is read into them in place.
        zeros = [torch.zeros(num_units, dtype=torch.float64) for _ in range(4)]
        return NormHistory(torch.full((window, num_units), torch.nan, dtype=torch.float64), *zeros)


def robust_score(G_L: Tensor, history: NormHistory) -> Tensor:
    """Return the distance of log-norms from the median of the newest rounds, in standard deviations.

    The spread comes from differences of successive rounds, so a steady decay does not widen it; only believed
    norms are in the history, so the root mean square can be used, which needs fewer rounds than a median.
    """
    x_WL = history.norms_WL.log()
    centre_L = x_WL[-RECENT:].nanquantile(0.5, dim=0)
    num_steps_L = (history.rounds_L.clamp(max=x_WL.shape[0]) - 1).clamp(min=1)
    variance_L = (x_WL.diff(dim=0).nan_to_num(0.0) ** 2).sum(0) / num_steps_L / 2
    sigma_L = (variance_L.sqrt() * (1 + 1 / num_steps_L)).clamp(
        min=MIN_SIGMA
    )  # few rounds: do not trust a small spread
    return (G_L.log() - centre_L) / sigma_L


def ema_score(G_L: Tensor, history: NormHistory) -> Tensor:
    """Return the z-score of raw norms by their running mean and variance (arXiv:2412.07210, eq. 2)."""
    return (G_L - history.mean_L) / history.var_L.sqrt().clamp(min=1e-12)


def judge(G_L: Tensor, history: NormHistory, config: PenaltyConfig) -> tuple[Tensor, NormHistory]:
    """Return the norms, inf where distrusted, and the history with the believed ones added."""
    finite_L = G_L.isfinite()
    distrusted_L = ~finite_L | _outliers(G_L, history, config)
    suspects_L = torch.where(distrusted_L & finite_L, history.suspects_L + 1, history.suspects_L * ~finite_L)
    renewed_L = suspects_L >= config.patience
    if renewed_L.any():
        empty = NormHistory.empty(len(G_L), len(history.norms_WL))
        history = replace_units(history, empty, renewed_L.nonzero().flatten().tolist())
        distrusted_L = distrusted_L & ~renewed_L
        suspects_L = suspects_L * ~renewed_L
    return G_L.masked_fill(distrusted_L, torch.inf), _learn(
        G_L, history, ~distrusted_L, suspects_L, config.ema
    )


def replace_units(old: NormHistory, new: NormHistory, units: list[int]) -> NormHistory:
    """Return `new` for `units` and `old` for the rest."""
    mask_L = torch.zeros(old.mean_L.numel(), dtype=torch.bool)
    mask_L[units] = True
    return NormHistory(*(torch.where(mask_L, ours, theirs) for ours, theirs in zip(new, old, strict=True)))


def _outliers(G_L: Tensor, history: NormHistory, config: PenaltyConfig) -> Tensor:
    ready_L = history.rounds_L >= config.warmup_rounds
    match config.detector:
        case "off":
            return torch.zeros_like(ready_L)
        case "robust":
            score_L = robust_score(G_L, history)
        case "ema":
            score_L = ema_score(G_L, history)
    return ready_L & (score_L > config.threshold)  # one-sided: a small norm is never a fault


def _learn(
    G_L: Tensor, history: NormHistory, believed_L: Tensor, suspects_L: Tensor, ema: float
) -> NormHistory:
    believed_L = believed_L & (G_L > 0)  # a unit that did not move says nothing about how far units move
    a_L = torch.full_like(history.mean_L, ema).masked_fill(history.rounds_L == 0, 1.0)
    off_L = G_L - history.mean_L
    rolled_WL = torch.cat([history.norms_WL[1:], G_L.unsqueeze(0)])
    return NormHistory(
        torch.where(believed_L, rolled_WL, history.norms_WL),
        torch.where(believed_L, history.mean_L + a_L * off_L, history.mean_L),
        torch.where(believed_L, (1 - a_L) * (history.var_L + a_L * off_L**2), history.var_L),
        history.rounds_L + believed_L,
        suspects_L,
    )
