"""Peers that only exist as signed cards: where the code of a peer places parts, and what moves when one goes.

The ideal is drawn without that code: in rendezvous hashing the scores of all peers for a part are independent
and equally distributed, so random numbers in their place give the distribution of the load.
"""

import time
from dataclasses import dataclass

import numpy as np

from aedit.launch.swarm import part_view
from aedit.proto.rpc import SigningKey
from aedit.proto.swarm import KnownPeers, PeerCard, encoded_card

RUN = "simulated"
LEASE_S = 10.0
_DRAWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Placement of all parts over so many peers, and changes of it."""

    peers: int
    parts: int
    copies: int
    mean: float
    """Replicas per peer."""
    most: int
    """Replicas of the peer that has most."""
    ideal_most: float
    """The same with independent draws, mean."""
    ideal_most_within: tuple[int, int]
    """95 % of the draws."""
    changes: int
    """Peers that left or came, one after the other."""
    moved: float
    """Replicas that began anew, per change."""
    ideal_moved: float
    owners_moved: float
    """Parts with another best-ranked peer, per change."""
    ideal_owners_moved: float
    needless: int
    """Replicas that begin anew though no other of their part has left, nor is it the new peer that begins."""
    look_s: float
    """CPU time in which a peer finds its role for all parts, once all others are known; the median."""


Places = dict[int, tuple[bytes, ...]]
"""Keys of the peers that are to keep a part, the owner's first."""


class Swarm:
    """Knowledge of one peer about all others, whose cards come as in gossip. Time is virtual."""

    def __init__(self, peers: int, parts: int, copies: int) -> None:
        self.parts, self.copies, self.now_s, self.made = parts, copies, 0.0, 0
        self.keys: list[SigningKey] = []
        own = self._new_key()
        self.known = KnownPeers(RUN, own.public, limit=2 * peers)
        self.known.renew(self._card(own), self.now_s)
        for _ in range(peers - 1):
            self.join()

    def join(self) -> bytes:
        """Let a new peer send its card and answer; return its key."""
        key = self._new_key()
        self.keys.append(key)
        self.known.offer(self._card(key), self.now_s)
        self.known.confirm(key.public, self.now_s)
        return key.public

    def leave(self, index: int) -> bytes:
        """Let a peer say that it leaves; return its key."""
        key = self.keys.pop(index)
        self.known.offer(self._card(key, leaving=True), self.now_s)
        return key.public

    def places(self) -> Places:
        """Return the peers that are to keep each part, as the peer that looks finds them."""
        live = self.known.live(self.now_s)
        views = (part_view(RUN, part, live, self.known.own_key) for part in range(self.parts))
        return {part: view.ranked[: self.copies] for part, view in enumerate(views)}

    def _new_key(self) -> SigningKey:
        self.made += 1
        return SigningKey(self.made.to_bytes(32, "big"))

    def _card(self, key: SigningKey, *, leaving: bool = False) -> bytes:
        address = f"10.{self.made >> 16}.{self.made >> 8 & 255}.{self.made & 255}:7000"
        card = PeerCard(
            run=RUN,
            name=key.public.hex()[:16],
            public_key=key.public,
            serial=1 + leaving,
            address=address,
            lease_s=LEASE_S,
            leaving=leaving,
        )
        return encoded_card(card, key.private)


def balance(peers: int, parts: int, copies: int, changes: int, seed: int) -> Balance:
    """Return the load of a swarm, and what moves while peers leave and come by turns."""
    chance, swarm = np.random.default_rng(seed), Swarm(peers, parts, copies)
    places, looks_s = swarm.places(), list[float]()
    load = _load(places, peers)
    moved = owners = needless = 0
    for number in range(changes):
        gone, new = b"", b""
        if number % 2:
            new = swarm.join()
        else:
            gone = swarm.leave(int(chance.integers(len(swarm.keys))))
        before, places = places, swarm.places()
        began_s = time.process_time()
        assert swarm.places() == places
        looks_s.append(time.process_time() - began_s)
        for part, keys in places.items():
            begun = set(keys) - set(before[part])
            moved += len(begun)
            owners += keys[0] != before[part][0]
            needless += len(begun) if gone not in before[part] and begun != {new} else 0
    ideal = _ideal_most(peers, parts, copies, chance)
    return Balance(
        peers=peers,
        parts=parts,
        copies=copies,
        mean=parts * copies / peers,
        most=int(load.max()),
        ideal_most=float(ideal.mean()),
        ideal_most_within=(int(np.quantile(ideal, 0.025)), int(np.quantile(ideal, 0.975))),
        changes=changes,
        moved=moved / changes,
        ideal_moved=parts * copies / peers,
        owners_moved=owners / changes,
        ideal_owners_moved=parts / peers,
        needless=needless,
        look_s=float(np.median(looks_s)),
    )


def _load(places: Places, peers: int) -> np.ndarray:
    keys = [key for found in places.values() for key in found]
    counts = np.unique(keys, return_counts=True)[1]
    return np.pad(counts, (0, peers - len(counts)))


def _ideal_most(peers: int, parts: int, copies: int, chance: np.random.Generator) -> np.ndarray:
    """Return the largest number of replicas of a peer, for many draws of the scores."""
    most = []
    for _ in range(_DRAWS):
        scores = chance.random((parts, peers))
        chosen = np.argpartition(-scores, copies - 1, axis=1)[:, :copies]
        most.append(np.bincount(chosen.ravel(), minlength=peers).max())
    return np.array(most)
