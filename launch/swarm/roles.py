"""The role of a peer for each part of the model, from the cards of all live peers. Pure functions.

Placement only says who offers to keep a part. Who owns it, and whose confirmation is waited for, is decided
by the votes of the part's replicas and nodes (`async_sgd.leadership`): two peers that see other members, or
none at all, can do no harm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from aedit.proto.swarm.card import PartReplica, PeerCard
from aedit.proto.swarm.placement import candidates, ranking
from aedit.proto.swarm.replicas_file import PartPlaces


class Role(Enum):
    """The next step of a peer with a part."""

    HOST = "host"
    """Begin to keep a replica of it."""
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
    """Replicas of the part by the key of their peer."""

    @property
    def owner(self) -> bytes | None:
        """Return the key of the peer that owns the part under the highest term; None if none is known."""
        leading = [key for key, replica in self.replicas.items() if replica.leads]
        return max(leading, key=lambda key: (self.replicas[key].term, key), default=None)

    def first(self) -> bytes | None:
        """Return the peer that should own the part: the best-ranked one whose replica is in sync; or None."""
        in_sync = (key for key in self.ranked if key in self.replicas and self.replicas[key].in_sync)
        return next(in_sync, None)

    def role(self, me: bytes, copies: int) -> Role:
        """Return what the peer `me` does with the part, of which `copies` replicas are wanted."""
        chosen = self.ranked[:copies]
        if me not in self.replicas:
            return Role.HOST if me in chosen and self.owner is not None else Role.KEEP
        if me in chosen or self.replicas[me].leads:
            return Role.KEEP
        in_sync = sum(key in self.replicas and self.replicas[key].in_sync for key in chosen)
        return Role.RETIRE if chosen and in_sync == len(chosen) and self.owner in chosen else Role.KEEP

    def places(self) -> PartPlaces:
        """Return the addresses of the replicas, for the processes of this machine."""
        ranked = [key for key in self.ranked if key in self.replicas]
        ranked += sorted(set(self.replicas) - set(ranked))

        def address(key: bytes | None) -> str:
            return "" if key is None else self.replicas[key].address

        return PartPlaces(tuple(map(address, ranked)), address(self.owner), address(self.first()))


def part_view(run: str, part: int, live: Mapping[bytes, PeerCard]) -> PartView:
    """Return the view of one part. live: cards of the live peers by key, this peer's own included."""
    replicas = {key: card.parts[part] for key, card in live.items() if part in card.parts}
    return PartView(ranking(run, part, candidates(live)), replicas)
