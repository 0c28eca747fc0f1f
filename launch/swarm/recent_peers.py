"""Counts the peers that can keep parts, with those that have vanished a moment ago."""

from collections.abc import Mapping

from aedit.proto.swarm.card import PeerCard
from aedit.proto.swarm.placement import candidates


class RecentPeers:
    """The peers that can keep parts, and when each was live last.

    An owner acknowledges what most of the copies have, or all peers where there are fewer. A peer on a busy
    machine may hear from nobody for longer than a lease: if the others did not count at once, an owner there
    would need nobody but itself.
    """

    def __init__(self, for_s: float) -> None:
        """Count none yet. for_s: how long a peer counts that is not live any more."""
        self._for_s = for_s
        self._live_s: dict[bytes, float] = {}

    def count(self, live: Mapping[bytes, PeerCard], now_s: float) -> int:
        """Return the number of peers; one that has said that it leaves does not count.

        Args:
            live: Cards of the live peers by key.
            now_s: Time on a monotonic clock.
        """
        self._live_s |= dict.fromkeys(candidates(live), now_s)
        leaving = {key for key, card in live.items() if card.leaving}
        self._live_s = {
            key: at_s
            for key, at_s in self._live_s.items()
            if now_s - at_s < self._for_s and key not in leaving
        }
        return len(self._live_s)
