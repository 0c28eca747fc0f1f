"""Statements of owners that nodes have received, and the search for two that contradict each other.

Each peer tells the others what its own node has received, and compares. What it hears is kept by sender, so
that a peer that sends much displaces only what it has sent itself.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aedit.proto.rpc import is_signed_statement, parsed_statement, place_of

MOST_SENT = 128
"""Statements in one call: of more than that, the newest."""
MOST_KEPT = 1024
"""Statements that are kept of one sender."""
MOST_SENDERS = 128

Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Kept:
    """One statement; `number` counts those of its sender."""

    number: int
    data: bytes
    sha256: bytes


@dataclass(slots=True)
class _Sender:
    """Statements of one sender by what they are about, oldest first."""

    kept: OrderedDict[bytes, _Kept] = field(default_factory=OrderedDict)
    """Statements of this sender by `place_of`."""
    count: int = 0

    def keep(self, data: bytes, sha256: bytes) -> None:
        self.count += 1
        self.kept[place_of(data)] = _Kept(self.count, data, sha256)
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)


class Statements:
    """Statements that this peer's node and others have received. Any thread may call."""

    def __init__(self, run: str) -> None:
        """Know none. run: name of the run; statements about others are ignored."""
        self._run = run
        self._lock = threading.Lock()
        self._own = _Sender()
        self._heard: OrderedDict[bytes, _Sender] = OrderedDict()
        """Senders by key; the one that was heard least recently is first."""
        self._sent: OrderedDict[str, int] = OrderedDict()
        """Number of the last own statement that a peer has, by its address."""

    def received(self, statements: Iterable[bytes]) -> list[Pair]:
        """Take what this peer's own node has received; return the pairs that are proofs."""
        with self._lock:
            return self._taken(self._own, statements)

    def hear(self, sender: bytes, statements: Iterable[bytes]) -> list[Pair]:
        """Take what another peer's node has received; return the pairs that are proofs.

        Args:
            sender: Key of that peer, which has shown that it has it.
            statements: What it has sent; only its word says that the statements are signed.
        """
        with self._lock:
            found = self._heard.setdefault(sender, _Sender())
            self._heard.move_to_end(sender)
            while len(self._heard) > MOST_SENDERS:
                self._heard.popitem(last=False)
            return self._taken(found, statements)

    def unsent(self, address: str) -> list[bytes]:
        """Return what the peer at an address was not sent: at most `MOST_SENT`, the newest."""
        with self._lock:
            last = self._sent.get(address, 0)
            waiting = [one.data for one in self._own.kept.values() if one.number > last]
            return waiting[-MOST_SENT:]

    def sent(self, address: str, statements: Sequence[bytes]) -> None:
        """Note that the peer at an address has these; what is older is not sent to it any more."""
        with self._lock:
            numbers = {one.data: one.number for one in self._own.kept.values()}
            newest = max((numbers.get(data, 0) for data in statements), default=0)
            self._sent[address] = max(newest, self._sent.pop(address, 0))
            while len(self._sent) > MOST_KEPT:
                self._sent.popitem(last=False)

    def _taken(self, sender: _Sender, statements: Iterable[bytes]) -> list[Pair]:
        proofs: list[Pair] = []
        for data in statements:
            try:
                found = parsed_statement(data)
            except ValueError:
                continue
            if found.run != self._run:
                continue
            place = place_of(data)
            others = self._others(place, found.sha256)
            # Signatures are looked at only where values differ. A sender of what nobody has signed is left.
            if others and not is_signed_statement(data):
                break
            proofs += [(data, other) for keeper, other in others if _is_true(keeper, place, other)]
            if place not in sender.kept:
                sender.keep(data, found.sha256)
        return proofs

    def _others(self, place: bytes, sha256: bytes) -> list[tuple[_Sender, bytes]]:
        """Return the statements that give a version another value, with who keeps them."""
        keepers = (self._own, *self._heard.values())
        found = ((keeper, keeper.kept.get(place)) for keeper in keepers)
        return [(keeper, one.data) for keeper, one in found if one and one.sha256 != sha256]


def _is_true(keeper: _Sender, place: bytes, data: bytes) -> bool:
    """Return whether a kept statement is signed; forget it if not."""
    if is_signed_statement(data):
        return True
    del keeper.kept[place]
    return False
