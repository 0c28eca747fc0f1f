"""Proofs that a key has lied, and their files: two cards of one serial, or statements that contradict."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aedit.proto.rpc import VERSION, Statement, contradict
from aedit.proto.swarm.card import decoded_card
from aedit.system import write_atomically


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
                found = read_proof(path)
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
            self._kept.add(key)
            path = self._folder / f"{key.hex()[:16]}.json"
            self._folder.mkdir(exist_ok=True)
            write_atomically(path, proof_text(found))
            log.warning("peer shut out: %s; proof: %s", found.reason, path)


def proof_text(found: Contradiction) -> str:
    """Return the content of a file with the proof."""
    told = {"reason": found.reason, "key": found.public_key.hex()}
    return json.dumps(told | {"one": found.one.hex(), "other": found.other.hex()}, indent=1) + "\n"


def read_proof(path: Path) -> Contradiction:
    """Return what a file proves. `reason` in the file is for people and not believed.

    Raises:
        ValueError: It proves nothing.
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MOST_BYTES))
        one, other = bytes.fromhex(told["one"]), bytes.fromhex(told["other"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a proof ({error}); expected JSON with `one` and `other` in hex"
        ) from None
    found = contradiction(one, other)
    if found is None:
        raise ValueError(f"{path}: no proof: `one` and `other` are not two signed values of one version")
    return found
