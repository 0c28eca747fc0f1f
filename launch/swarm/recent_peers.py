"""The peers that can keep parts, with those that have vanished a moment ago."""

from collections.abc import Mapping

from aedit.proto.swarm import PeerCard, candidates


class RecentPeers:
    """The peers that can keep parts, and when each was live last.

    A peer on a busy machine may be heard of too late, or hear too late from all others. It is back a moment
    later. If it did not count meanwhile, others would take its replicas over, and an owner that hears from
    nobody would need nobody but itself to acknowledge.
    """

    def __init__(self, for_s: float) -> None:
        """Know none yet. for_s: how long a peer is remembered that is not live any more."""
        self._for_s, self._now_s = for_s, 0.0
        self._live_s: dict[bytes, float] = {}

    def look(self, live: Mapping[bytes, PeerCard], now_s: float) -> None:
        """Take the cards of the live peers by key; one that has said that it leaves does not count.

        now_s: time on a monotonic clock.
        """
        self._now_s = now_s
        self._live_s |= dict.fromkeys(candidates(live), now_s)
        leaving = {key for key, card in live.items() if card.leaving}
        self._live_s = {
            key: at_s
            for key, at_s in self._live_s.items()
            if now_s - at_s < self._for_s and key not in leaving
        }

    def within(self, seconds: float) -> frozenset[bytes]:
        """Return the keys of the peers that were live less than `seconds` before the last look."""
        return frozenset(key for key, at_s in self._live_s.items() if self._now_s - at_s < seconds)
