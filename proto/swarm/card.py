"""Peer cards: what a peer says of itself, signed with the key that is its identity.

On the wire a card is a version byte, an Ed25519 signature (64 bytes) and the message `Card` of swarm.proto.
There is one encoding for each card: other bytes of the same content are refused.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from aedit.proto.rpc import KEY_BYTES, MOST_GENERATIONS, SIGNATURE_BYTES, is_signed_by
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.system import write_atomically
from aedit.types import address_fault, name_fault, printable

VERSION = 1
PURPOSE = b"aedit peer card 1\n"
"""Precedes the signed bytes, so that a signature for another purpose is never taken for one of a card."""
MOST_CARD_BYTES = 4095
"""A record of a distributed hash table has less than 4 KiB."""
MOST_PARTS = 4096
FOUNDER_BYTES = 8
"""Bytes of a key that name a candidate, so that a card has room for many parts."""
MOST_MEMBERS = 4096
"""Peers of a run that a card may speak of."""
LONGEST_NAME = 64
LEAST_LEASE_S, MOST_LEASE_S = 1.0, 300.0
MOST_STEPS_PER_S = 1e9
CARD_HEAD_BYTES = 1 + SIGNATURE_BYTES
"""Version and signature; what is signed follows."""
_MOST_SERIAL = 2**63 - 1
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")
_MODEL = re.compile(r"([0-9a-f]{8,64})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReplica:
    """A replica of a part of the model that a peer hosts."""

    address: str
    """HOST:PORT of the hub process that hosts it."""
    term: int
    """Term that it knows."""
    leads: bool
    in_sync: bool
    """Whether it is a replica of the newest configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """The vote of a peer on a part that is lost, or was founded again."""

    generation: int
    """0: it has voted for no founding."""
    candidate: bytes
    """First bytes of the key of the peer that it lets found this generation; empty with generation 0."""
    members: int
    """Peers that it knew when the part last had an owner: most of them must agree."""
    forced: int = 0
    """Generation of the founding that counts for it, if it knows of any that was forced; else 0."""
    founder: bytes = b""
    """First bytes of the key of the peer that has founded it; empty with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCard:
    """State of one peer, as it says itself."""

    run: str
    name: str
    public_key: bytes
    """Ed25519, 32 bytes: the identity of the peer."""
    serial: int
    """Grows with every card of this key, also over restarts."""
    address: str
    """HOST:PORT of its gossip service; "" for a client, which hosts nothing."""
    parts: Mapping[int, PartReplica] = field(default_factory=dict)
    fingerprint: str = ""
    """SHA-256 of its TLS certificate, in hexadecimal; "" without TLS, and for a client."""
    model: str = ""
    """SHA-256 of the model that the node of this machine trains, see `model_sha256`; "" without a node."""
    steps_per_s: float = 0.0
    """Inner steps per second of that node; 0 if it is unknown."""
    lease_s: float = 10.0
    """How long it counts after this serial was first seen."""
    leaving: bool = False
    foundings: Mapping[int, Founding] = field(default_factory=dict)
    """Its votes on parts that are lost or were founded again, by part."""


def encoded_card(card: PeerCard, key: Ed25519PrivateKey) -> bytes:
    """Return the card, signed; at most `MOST_CARD_BYTES`.

    Raises:
        ValueError: A value is out of bounds, or `key` is not that of the card.
    """
    check_peer_card(card)
    if key.public_key().public_bytes_raw() != card.public_key:
        raise ValueError("public_key is not that of the key that is to sign the card: give both of one peer")
    body = _body(card)
    _check_size(CARD_HEAD_BYTES + len(body))
    return bytes((VERSION,)) + key.sign(PURPOSE + body) + body


def decoded_card(data: bytes) -> PeerCard:
    """Return the card in `data` if its own key has signed it and every value is in bounds.

    Raises:
        ValueError: Otherwise; the text names field, value and expectation.
    """
    card = parsed_card(data)
    check_peer_card(card)
    if _body(card) != data[CARD_HEAD_BYTES:]:
        raise ValueError("the card is not in the form in which it is signed: fields are unknown or repeated")
    if not is_signed_by(card.public_key, data[1:CARD_HEAD_BYTES], PURPOSE + data[CARD_HEAD_BYTES:]):
        raise ValueError(f"the card of {printable(card.name)!r} is not signed with its own key")
    return card


def parsed_card(data: bytes) -> PeerCard:
    """Return the card in `data`, unchecked.

    Raises:
        ValueError: It is too long, of another version or not a card.
    """
    _check_size(len(data))
    if data[:1] != bytes((VERSION,)):
        found = data[0] if data else "none"
        raise ValueError(f"the card has the version {found}; this build reads {VERSION}")
    try:
        message = pb.Card.FromString(data[CARD_HEAD_BYTES:])
    except DecodeError as error:
        raise ValueError(f"not a card: {error}") from None
    parts = {one.part: PartReplica(**_values(one, PartReplica)) for one in message.parts}
    foundings = {one.part: Founding(**_values(one, Founding)) for one in message.foundings}
    return PeerCard(**_values(message, PeerCard) | {"parts": parts, "foundings": foundings})


def _values(source: Any, kind: type) -> dict[str, Any]:
    """Return the values of the fields of the dataclass `kind`, whose names are those of its message."""
    return {name: getattr(source, name) for name in _NAMES[kind]}


_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(each.name for each in fields(kind)) for kind in (PeerCard, PartReplica, Founding)
}


def check_peer_card(card: PeerCard) -> None:
    """Raise ValueError for the first value that cannot be true."""
    for key, text in (("run", card.run), ("name", card.name)):
        if fault := name_fault(text, LONGEST_NAME):
            raise ValueError(f"{key} {fault}")
    if len(card.public_key) != KEY_BYTES:
        raise ValueError(f"public_key has {len(card.public_key)} bytes; an Ed25519 key has {KEY_BYTES}")
    if not 1 <= card.serial <= _MOST_SERIAL:
        raise ValueError(f"serial is {card.serial}; it must be in [1, 2^63)")
    if card.address and (fault := address_fault(card.address)):
        raise ValueError(fault)
    if not _FINGERPRINT.fullmatch(card.fingerprint):
        raise ValueError(f"fingerprint {card.fingerprint[:80]!r} is not 64 hexadecimal digits")
    if not is_model_digest(card.model):
        raise ValueError(f"model {card.model[:80]!r} is not 8 to 64 hexadecimal digits")
    _check_number("steps_per_s", card.steps_per_s, 0.0, MOST_STEPS_PER_S)
    _check_number("lease_s", card.lease_s, LEAST_LEASE_S, MOST_LEASE_S)
    if card.parts and not card.address:
        raise ValueError(f"{len(card.parts)} parts and no address: a client hosts nothing")
    if card.fingerprint and not card.address:
        raise ValueError("fingerprint and no address: nobody can meet the certificate of a client")
    for part, replica in card.parts.items():
        _check_part(part, replica)
    for part, founding in card.foundings.items():
        _check_founding(part, founding)


def is_model_digest(text: str) -> bool:
    """Return whether a card can have this digest of a model; "" is one."""
    return _MODEL.fullmatch(text) is not None


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} is {value:g}; it must be in [{least:g}, {most:g}]")


def _check_part(part: int, replica: PartReplica) -> None:
    if not 0 <= part < MOST_PARTS:
        raise ValueError(f"part {part}: parts are numbered 0 to {MOST_PARTS - 1}")
    if fault := address_fault(replica.address):
        raise ValueError(f"part {part}: {fault}")
    if not 0 <= replica.term <= _MOST_SERIAL:
        raise ValueError(f"part {part}: term is {replica.term}; it must be in [0, 2^63)")


def _check_founding(part: int, founding: Founding) -> None:
    if not 0 <= part < MOST_PARTS:
        raise ValueError(f"founding of part {part}: parts are numbered 0 to {MOST_PARTS - 1}")
    for name, generation, peer, key in (
        ("generation", founding.generation, "candidate", founding.candidate),
        ("forced", founding.forced, "founder", founding.founder),
    ):
        if not 0 <= generation < MOST_GENERATIONS:
            most = MOST_GENERATIONS - 1
            raise ValueError(f"part {part}: {name} is {generation}; it must be in [0, {most}]")
        expected = FOUNDER_BYTES if generation else 0
        if len(key) != expected:
            raise ValueError(f"part {part}: {peer} has {len(key)} bytes; expected {expected}")
    if not 0 <= founding.members <= MOST_MEMBERS:
        raise ValueError(f"part {part}: members is {founding.members}; it must be in [0, {MOST_MEMBERS}]")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_CARD_BYTES:
        raise ValueError(
            f"the card has {num_bytes} bytes; at most {MOST_CARD_BYTES} are possible: host fewer parts"
        )


def _body(card: PeerCard) -> bytes:
    parts = [
        pb.HostedPart(part=part, **_values(one, PartReplica)) for part, one in sorted(card.parts.items())
    ]
    foundings = [
        pb.Founding(part=part, **_values(one, Founding)) for part, one in sorted(card.foundings.items())
    ]
    values = _values(card, PeerCard) | {"parts": parts, "foundings": foundings}
    return pb.Card(**values).SerializeToString(deterministic=True)


_RESERVED = 4096


class Serials:
    """Numbers that grow. A file keeps a bound that no number given so far has reached.

    Without the file, for example on a new disk, they continue at the wall clock's milliseconds.
    """

    def __init__(self, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        """Continue after the numbers of an earlier process.

        Raises:
            ValueError: The file does not contain a number.
            OSError: It cannot be read.
        """
        self._path = path
        try:
            kept = path.read_text(encoding="ascii").strip() if path.exists() else "0"
            self._reserved = int(kept)
        except ValueError:
            raise ValueError(f"{path} does not contain a number: delete it") from None
        self._last = max(self._reserved, int(wall_s() * 1000))

    def next(self, above: int = 0) -> int:
        """Return a number above all former ones and `above`. Raises OSError if the file cannot be written."""
        number = max(self._last, above) + 1
        if number >= self._reserved:
            write_atomically(self._path, f"{number + _RESERVED}\n")
            self._reserved = number + _RESERVED
        self._last = number
        return number
