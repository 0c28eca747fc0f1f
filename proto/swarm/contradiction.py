"""Proofs that a key has lied: two cards with one serial, or two statements about one version."""

from dataclasses import dataclass

from aedit.proto.rpc import VERSION, Statement, contradict
from aedit.proto.swarm.card import decoded


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A key that has signed two things of which at most one is true."""

    run: str
    public_key: bytes
    reason: str
    """Description of the fault for people, without the name of the peer."""
    one: bytes
    other: bytes
    statement: Statement | None = None
    """Version that two statements describe; None: the proof is two cards."""


def contradiction(one: bytes, other: bytes) -> Contradiction | None:
    """Return what `one` and `other` prove; None if they prove nothing."""
    if one[:1] == bytes((VERSION,)):
        place = contradict(one, other)
        if place is None:
            return None
        reason = f"it has signed two values of {place.described()}"
        return Contradiction(place.run, place.public_key, reason, one, other, place)
    try:
        first, second = decoded(one), decoded(other)
    except ValueError:
        return None
    same = (first.public_key, first.run, first.serial) == (second.public_key, second.run, second.serial)
    if not same or one == other:
        return None
    reason = f"two different cards of {first.name!r} have the serial {first.serial}"
    return Contradiction(first.run, first.public_key, reason, one, other)
