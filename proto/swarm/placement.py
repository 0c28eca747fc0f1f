"""Choice of the peers that host each part, by rendezvous hashing.

D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates", 1998. Each peer has a score
for each part, and the highest ones host it. When a peer comes or goes, only parts move in whose ranking it
was among the first.
"""

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache

from aedit.proto.swarm.card import PeerCard

_PURPOSE = b"aedit placement 1\n"
_KEPT = 256
"""Rankings that are remembered: more than a run has parts."""


def ranking(run: str, part: int, keys: Collection[bytes]) -> tuple[bytes, ...]:
    """Return the keys, the one with the highest score for the part first. Their order does not matter.

    A score is 32 bytes of SHA-256, compared as an unsigned number.
    """
    return _ranked(run, part, frozenset(keys))


@lru_cache(_KEPT)
def _ranked(run: str, part: int, keys: frozenset[bytes]) -> tuple[bytes, ...]:
    """Return the ranking. A peer looks twice a second, and the keys change seldom."""
    begun = hashlib.sha256(_PURPOSE + hashlib.sha256(run.encode()).digest() + part.to_bytes(4, "big"))

    def score(key: bytes) -> tuple[bytes, bytes]:
        found = begun.copy()
        found.update(key)
        return found.digest(), key

    return tuple(sorted(keys, key=score, reverse=True))


def hosts_of(run: str, part: int, keys: Collection[bytes], copies: int) -> tuple[bytes, ...]:
    """Return the keys of the peers that are to host the part, the one that is to own it first."""
    return ranking(run, part, keys)[:copies]


def candidates(live: Mapping[bytes, PeerCard]) -> frozenset[bytes]:
    """Return the keys of the live peers that can host parts: neither clients nor peers that leave."""
    return frozenset(key for key, card in live.items() if card.address and not card.leaving)
