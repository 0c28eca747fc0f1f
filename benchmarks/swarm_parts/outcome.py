"""Outcome of one way of training, equal for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """Work and waits of one peer."""

    steps: int
    waited_s: float
    """Time in which its trainer waited for others, without the good-bye."""
    wall_s: float
    progress: tuple[tuple[float, float], ...]
    """Seconds since the beginning and tokens of this peer, in order."""
    losses: tuple[tuple[float, float], ...] = ()
    """Seconds and held-out loss, of a peer that evaluates."""
    rounds: int = 0
    failed: int = 0
    """Rounds in which something of this peer did not count."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Work and waits of all peers of a run."""

    peers: tuple[PeerOutcome, ...]
    sent: tuple[int, ...]
    """Bytes that each peer sent to others."""
    differing: int | None = None
    """Averages found to differ from those of others; None if nobody looked."""

    @property
    def tokens(self) -> float:
        """Return the tokens of all peers."""
        return sum(peer.progress[-1][1] for peer in self.peers)

    @property
    def stall(self) -> float:
        """Return the share of the peers' time in which their trainers waited."""
        return sum(peer.waited_s for peer in self.peers) / sum(peer.wall_s for peer in self.peers)

    @property
    def worst_stall(self) -> float:
        """Return the largest share of any peer."""
        return max(peer.waited_s / peer.wall_s for peer in self.peers)

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Return seconds, tokens of all peers until then, and held-out loss, in order."""
        times = [(t, loss) for peer in self.peers for t, loss in peer.losses]
        return [(t, self.tokens_at(t), loss) for t, loss in sorted(times)]

    def tokens_at(self, t: float) -> float:
        """Return the tokens of all peers after `t` seconds."""
        return sum(_at(t, peer.progress) for peer in self.peers)

    def loss_at_tokens(self, tokens: float) -> float:
        """Return the held-out loss after so many tokens, interpolated."""
        return _at(tokens, [(n, loss) for _, n, loss in self.curve])

    def loss_at_time(self, t: float) -> float:
        """Return the held-out loss after `t` seconds, interpolated."""
        return _at(t, [(t, loss) for t, _, loss in self.curve])


def _at(x: float, points: Sequence[tuple[float, float]]) -> float:
    return float(np.interp(x, [at for at, _ in points], [loss for _, loss in points]))
