"""Statements of owners that nodes have received, and the search for two that contradict each other.

Each peer tells the others what its own node has received, and compares. What it receives is kept by sender,
so that a peer that sends much displaces only what it has sent itself.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from aedit.proto.rpc import (
    DIGEST_BYTES,
    VERSION,
    Statement,
    contradict,
    is_signed_statement,
    parsed_statement,
    place_of,
)
from aedit.proto.swarm.card import decoded_card
from aedit.system import write_atomically

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
    part: int


@dataclass(slots=True)
class _Sender:
    """Statements of one sender by what they are about, oldest first."""

    kept: OrderedDict[bytes, _Kept] = field(default_factory=OrderedDict)
    """Statements of this sender by `place_of`."""
    count: int = 0

    def keep(self, data: bytes, found: Statement) -> None:
        self.count += 1
        self.kept[place_of(data)] = _Kept(self.count, data, found.sha256, found.part)
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)


class Statements:
    """Statements that this peer's node and others have received. Any thread may call."""

    def __init__(self, run: str) -> None:
        """Start empty. run: name of the run; statements about others are ignored."""
        self._run = run
        self._lock = threading.Lock()
        self._own = _Sender()
        self._of_peers: OrderedDict[bytes, _Sender] = OrderedDict()
        """Senders by key; the one that has sent least recently is first."""
        self._sent: OrderedDict[str, int] = OrderedDict()
        """Number of the last own statement that a peer has, by its address."""

    def received(self, statements: Iterable[bytes]) -> list[Pair]:
        """Take what this peer's own node has received; return the pairs that are proofs."""
        with self._lock:
            return self._taken(self._own, statements)

    def received_from(self, sender: bytes, statements: Iterable[bytes]) -> list[Pair]:
        """Take what another peer's node has received; return the pairs that are proofs.

        Args:
            sender: Key of that peer, which has shown that it has it.
            statements: What it has sent; it has not been checked that the statements are signed.
        """
        with self._lock:
            found = self._of_peers.setdefault(sender, _Sender())
            self._of_peers.move_to_end(sender)
            while len(self._of_peers) > MOST_SENDERS:
                self._of_peers.popitem(last=False)
            return self._taken(found, statements)

    def about(self, part: int) -> list[bytes]:
        """Return the newest statements about a part: of each sender at most `MOST_SENT`, each once."""
        with self._lock:
            found: dict[bytes, None] = {}
            for sender in (self._own, *self._of_peers.values()):
                kept = (one.data for one in reversed(sender.kept.values()) if one.part == part)
                found |= dict.fromkeys(islice(kept, MOST_SENT))
            return sorted(found)

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
            keepers = ((keeper, keeper.kept.get(place)) for keeper in (self._own, *self._of_peers.values()))
            others = [(keeper, one.data) for keeper, one in keepers if one and one.sha256 != found.sha256]
            # Signatures are checked only where values differ. What follows an unsigned one is ignored.
            if others and not is_signed_statement(data):
                break
            proofs += [(data, other) for keeper, other in others if _is_true(keeper, place, other)]
            if place not in sender.kept:
                sender.keep(data, found)
        return proofs


def _is_true(keeper: _Sender, place: bytes, data: bytes) -> bool:
    """Return whether a kept statement is signed; forget it if not."""
    if is_signed_statement(data):
        return True
    del keeper.kept[place]
    return False


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A key that has signed two things of which at most one is true."""

    run: str
    public_key: bytes
    reason: str
    """Description of the fault, without the name of the peer."""
    one: bytes
    other: bytes
    statement: Statement | None = None
    """Version that two statements describe; None: the proof is two cards."""
    is_replayed: bool = False
    """`other` is the SHA-256 that the journal of the owner gives, as this machine has recomputed it. Others
    cannot check that, and are not asked to believe it."""


def replay_difference(data: bytes, replayed: bytes) -> Contradiction:
    """Return the fault of an owner whose journal gives another value than it has signed.

    replayed: SHA-256 of the version, as this machine has recomputed it. Raises ValueError if the statement is
    not signed, or has that value.
    """
    said = parsed_statement(data)
    if not is_signed_statement(data) or len(replayed) != DIGEST_BYTES or said.sha256 == replayed:
        raise ValueError("no signed statement of another value")
    reason = f"it has signed another value of {said.described()} than its journal gives"
    return Contradiction(said.run, said.public_key, reason, data, replayed, said, is_replayed=True)


def contradiction(one: bytes, other: bytes) -> Contradiction | None:
    """Return what `one` and `other` prove; None if they prove nothing."""
    if one[:1] == bytes((VERSION,)):
        place = contradict(one, other)
        if place is None:
            return None
        reason = f"it has signed two values of {place.described()}"
        return Contradiction(place.run, place.public_key, reason, one, other, place)
    try:
        first, second = decoded_card(one), decoded_card(other)
    except ValueError:
        return None
    same = (first.public_key, first.run, first.serial) == (second.public_key, second.run, second.serial)
    if not same or one == other:
        return None
    reason = f"two different cards of {first.name!r} have the serial {first.serial}"
    return Contradiction(first.run, first.public_key, reason, one, other)


log = logging.getLogger(__name__)

_MOST_BYTES = 2**16
_MOST_FILES = 1024


class Proofs:
    """Folder of the proofs that a peer has seen. What they prove counts after a restart, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: set[bytes] = set()

    def load(self) -> Iterator[Contradiction]:
        """Yield what the files prove. One that proves nothing is named and left out. Raises OSError."""
        for path in sorted(self._folder.glob("*.json"))[:_MOST_FILES]:
            try:
                found = read_proof(path, of_this_machine=True)
            except ValueError as error:
                log.warning("%s", error)
                continue
            self._kept.add(found.public_key)
            yield found

    def keep(self, faults: Mapping[bytes, Contradiction]) -> None:
        """Write the proofs that are not in the folder, and log them. Raises OSError.

        Two cards are no lasting proof: two processes with one key file cause them as well.
        """
        for key, found in faults.items():
            if key in self._kept or found.statement is None or len(self._kept) >= _MOST_FILES:
                continue
            path = self._folder / f"{key.hex()[:16]}.json"
            self._folder.mkdir(exist_ok=True)
            write_atomically(path, proof_text(found))
            self._kept.add(key)
            log.warning("peer shut out: %s; proof: %s", found.reason, path)


def proof_text(found: Contradiction) -> str:
    """Return the content of a file with the proof."""
    content = {"reason": found.reason, "key": found.public_key.hex(), "is_replayed": found.is_replayed}
    return json.dumps(content | {"one": found.one.hex(), "other": found.other.hex()}, indent=1) + "\n"


def read_proof(path: Path, *, of_this_machine: bool = False) -> Contradiction:
    """Return what a file proves. `reason` in the file is ignored.

    of_this_machine: its peer has written the file, and recomputed what is in it.

    Raises:
        ValueError: It proves nothing.
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        one, other = bytes.fromhex(content["one"]), bytes.fromhex(content["other"])
        is_replayed = content.get("is_replayed") is True
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a proof ({error}); expected JSON with `one` and `other` in hex"
        ) from None
    if is_replayed and not of_this_machine:
        raise ValueError(
            f"{path}: no proof by itself: the peer that has written it has recomputed the version from the"
            " journal in its part_K"
        )
    found = replay_difference(one, other) if is_replayed else contradiction(one, other)
    if found is None:
        raise ValueError(f"{path}: no proof: `one` and `other` are not two signed values of one version")
    return found
