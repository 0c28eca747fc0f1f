"""The role of a peer for each part of the model, from the cards of all live peers. Pure functions.

Placement only says who offers to keep a part. Who owns it, and whose confirmation is waited for, is decided
by the votes of the part's replicas and nodes (`async_sgd.leadership`): two peers that see other members, or
none at all, can do no harm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from aedit.proto.swarm import PartPlaces, PartReplica, PeerCard, candidates, ranking


class Role(Enum):
    """The next step of a peer with a part."""

    HOST = "host"
    """Begin to keep a replica of it."""
    WAIT = "wait"
    """Begin to keep one when others have given theirs up, or after a while."""
    RETIRE = "retire"
    """Give up the own replica."""
    KEEP = "keep"
    """Nothing changes."""


@dataclass(frozen=True, slots=True)
class PartView:
    """One part, as the live peers describe it."""

    ranked: tuple[bytes, ...]
    """Keys of the peers that can keep the part, those that should do so first."""
    replicas: Mapping[bytes, PartReplica]
    """Replicas of the part by the key of their peer, as it says itself."""
    me: bytes = b""
    """Key of the peer that looks."""
    placed: tuple[bytes, ...] = ()
    """The ranking with the peers that have vanished a moment ago; empty: `ranked`."""

    @property
    def owner(self) -> bytes | None:
        """Return the key of the peer that owns the part, as far as cards tell; None if none is known.

        A card may lie. So of several that say so, it is the one that the own replica follows or is, then the
        one that most replicas in sync follow, then the one of the highest term.
        """
        leading = [key for key, replica in self.replicas.items() if replica.leads]

        def rank(key: bytes) -> tuple[bool, int, int, bytes]:
            followers = self._followers(self.replicas[key].term)
            return key == self.me or self.me in followers, len(followers), self.replicas[key].term, key

        return max(leading, key=rank, default=None)

    def _followers(self, term: int) -> set[bytes]:
        """Return the peers whose replicas are in sync with an owner of this term."""
        replicas = self.replicas.items()
        return {key for key, one in replicas if one.in_sync and not one.leads and one.term == term}

    def first(self) -> bytes | None:
        """Return the peer that should own the part: the best-ranked one whose replica is in sync; or None."""
        in_sync = (key for key in self.ranked if key in self.replicas and self.replicas[key].in_sync)
        return next(in_sync, None)

    def role(self, copies: int, others: int) -> Role:
        """Return what this peer does with the part.

        Args:
            copies: Replicas that are wanted.
            others: Replicas on which the voters have agreed without the own one, as its journal has them; 0
                while the own one counts. What cards say is not enough to give a replica up.
        """
        me, chosen = self.me, self._chosen(copies)
        if me not in self.replicas:
            return self._beginning(chosen, copies) if me in chosen and self.owner is not None else Role.KEEP
        if me in chosen or self.replicas[me].leads:
            return Role.KEEP
        return Role.RETIRE if chosen and others >= copies else Role.KEEP

    def _chosen(self, copies: int) -> tuple[bytes, ...]:
        """Return the peers that are to keep the part.

        One that has vanished a moment ago is one of them, unless most of the copies are gone.
        """
        num_copies = sum(key in self.replicas and self.replicas[key].in_sync for key in self.ranked)
        return (self.placed or self.ranked if num_copies > copies // 2 else self.ranked)[:copies]

    def _beginning(self, chosen: tuple[bytes, ...], copies: int) -> Role:
        """Return the role of a chosen peer without a replica: there is one replica too many at most.

        Otherwise each change of the ranking would add replicas sooner than others are given up, and on a busy
        machine each of them makes the ranking change again.
        """
        missing = [key for key in chosen if key in self.ranked and key not in self.replicas]
        vanished = sum(key not in self.ranked for key in chosen)
        present = sum(key in self.replicas for key in self.ranked) + vanished
        return Role.HOST if self.me in missing[: max(0, copies + 1 - present)] else Role.WAIT

    def places(self, copies: int, peers: int = 0) -> PartPlaces:
        """Return the addresses of the replicas, of which `copies` are wanted, for the processes here.

        peers: that can keep the part, with those whose cards ran out a moment ago.
        """
        ranked = [key for key in self.ranked if key in self.replicas]
        ranked += sorted(set(self.replicas) - set(ranked))

        def address(key: bytes | None) -> str:
            return "" if key is None else self.replicas[key].address

        least = max(1, min(copies // 2 + 1, max(peers, len(self.ranked))))
        keys = tuple(key.hex() for key in ranked)
        return PartPlaces(
            tuple(map(address, ranked)), address(self.owner), address(self.first()), least, keys
        )


def part_view(
    run: str,
    part: int,
    live: Mapping[bytes, PeerCard],
    me: bytes = b"",
    counts: Callable[[int], bool] = lambda term: True,
    lately: frozenset[bytes] = frozenset(),
) -> PartView:
    """Return the view of one part.

    Args:
        run: Name of the run.
        part: Number of the part.
        live: Cards of the live peers by key, that of the peer `me` included.
        me: Key of the peer that looks.
        counts: Returns whether replicas with a term are of the founding of the part that counts.
        lately: Keys of the peers that can keep parts and were live a moment ago.
    """
    hosted = {key: card.parts[part] for key, card in live.items() if part in card.parts}
    replicas = {key: replica for key, replica in hosted.items() if counts(replica.term)}
    hosts = candidates(live)
    return PartView(
        ranking(run, part, hosts), replicas, me, placed=ranking(run, part, hosts | lately) if lately else ()
    )
