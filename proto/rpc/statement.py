"""Statements of owners in a swarm: which values an anchor has, signed with the key of the owner's peer.

On the wire a statement is a version byte, an Ed25519 signature (64 bytes) and the message `Statement` of
swarm.proto. There is one encoding for each statement: other bytes of the same content are refused.

The upper bits of a term are the generation of its part. A part without any replica left is re-created, with a
new journal. Each re-creation is a lineage: its terms are above all terms of earlier generations, so that
the newer one is followed. Two peers that re-create one generation, which their votes exclude, would have
terms of different lineages as well.
"""

import re
from dataclasses import dataclass, fields, replace
from hashlib import sha256

from google.protobuf.message import DecodeError

from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.rpc.keys import KEY_BYTES, SIGNATURE_BYTES, SigningKey, is_signed_by
from aedit.types import name_fault

VERSION = 2
"""First byte of a statement; that of a card is another one."""
PURPOSE = b"aedit statement of an anchor 1\n"
"""Precedes the signed bytes, so that a signature for another purpose is never taken for a statement's."""
MOST_STATEMENT_BYTES = 512
HEAD_BYTES = 1 + SIGNATURE_BYTES
"""Version and signature; what is signed follows."""
DIGEST_BYTES = 32
_VALUE_BYTES = 2 + DIGEST_BYTES
"""Size on the wire of the field `sha256`, which is the last one."""
_MOST_PARTS, _MOST_NUMBER = 4096, 2**63 - 1
_LONGEST_RUN = 64
_LINEAGE = re.compile(r"[0-9A-Za-z]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The value of one version of a unit's anchor, as the owner of its part gives it."""

    run: str
    part: int
    public_key: bytes
    """Ed25519 key of the peer that hosts the owner."""
    lineage: str
    """Epoch of the journal: versions of another journal are others."""
    term: int
    """Under which the owner leads."""
    unit: int
    version: int
    sha256: bytes = b""
    """SHA-256 of the anchor in fp32, as every node has it; empty in `place`."""

    @property
    def place(self) -> "Statement":
        """Return what the statement is about, without the value: of one place a key signs one value."""
        return replace(self, sha256=b"")

    def described(self) -> str:
        """Return what the statement is about, as text."""
        return f"version {self.version} of unit {self.unit} (part {self.part}, term {self.term})"


_FIELDS = tuple(each.name for each in fields(Statement))
"""Names of the fields, which are those of the message."""


def signed(statement: Statement, key: SigningKey) -> bytes:
    """Return the statement, signed; at most `MOST_STATEMENT_BYTES`.

    Raises:
        ValueError: A value is out of bounds, or `key` is not that of the statement.
    """
    _check(statement)
    if key.public != statement.public_key:
        raise ValueError("public_key is not that of the key that is to sign: give both of one peer")
    body = _body(statement)
    return bytes((VERSION,)) + key.private.sign(PURPOSE + body) + body


def parsed_statement(data: bytes) -> Statement:
    """Return the statement in `data`, with every value in bounds. Its signature is not looked at.

    Raises:
        ValueError: It is none; the text names field, value and expectation.
    """
    if len(data) > MOST_STATEMENT_BYTES:
        raise ValueError(f"a statement of {len(data)} bytes; at most {MOST_STATEMENT_BYTES} are possible")
    if data[:1] != bytes((VERSION,)):
        raise ValueError(f"not a statement: it begins with {data[:1]!r}; expected {bytes((VERSION,))!r}")
    try:
        message = pb.Statement.FromString(data[HEAD_BYTES:])
    except DecodeError as error:
        raise ValueError(f"not a statement: {error}") from None
    found = Statement(**{name: getattr(message, name) for name in _FIELDS})
    _check(found)
    if _body(found) != data[HEAD_BYTES:]:
        raise ValueError("the statement is not as it is signed: fields are unknown or repeated")
    return found


def is_signed_statement(data: bytes) -> bool:
    """Return whether `data`, which `parsed_statement` has taken, is signed with the key that it names."""
    return is_signed_by(parsed_statement(data).public_key, data[1:HEAD_BYTES], PURPOSE + data[HEAD_BYTES:])


def place_of(data: bytes) -> bytes:
    """Return the bytes of a parsed statement that say what it is about: all but the value.

    They are what `Statement.place` is, in a form that is quick to look up.
    """
    return data[HEAD_BYTES:-_VALUE_BYTES]


def contradict(one: bytes, other: bytes) -> Statement | None:
    """Return what two statements are about if they prove that their signer has lied; else None.

    They are a proof if one key has signed both, about one version in one term of one journal, and the values
    differ. An owner that follows the protocol never signs such a pair.
    """
    try:
        first, second = parsed_statement(one), parsed_statement(other)
    except ValueError:
        return None
    differ = first.place == second.place and first.sha256 != second.sha256
    return first if differ and is_signed_statement(one) and is_signed_statement(other) else None


def _check(statement: Statement) -> None:
    """Raise ValueError for the first value that cannot be true."""
    if fault := name_fault(statement.run, _LONGEST_RUN):
        raise ValueError(f"run {fault}")
    if len(statement.public_key) != KEY_BYTES:
        raise ValueError(f"public_key has {len(statement.public_key)} bytes; expected {KEY_BYTES}")
    if not _LINEAGE.fullmatch(statement.lineage):
        raise ValueError(f"lineage {statement.lineage[:80]!r} is not 1 to 64 letters and digits")
    if len(statement.sha256) != DIGEST_BYTES:
        raise ValueError(f"sha256 has {len(statement.sha256)} bytes; expected {DIGEST_BYTES}")
    bounds = {"part": _MOST_PARTS - 1, "term": _MOST_NUMBER, "unit": 2**32 - 1, "version": _MOST_NUMBER}
    for name, most in bounds.items():
        least, value = int(name in ("term", "version")), getattr(statement, name)
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; it must be in [{least}, {most}]")


def _body(statement: Statement) -> bytes:
    message = pb.Statement(**{name: getattr(statement, name) for name in _FIELDS})
    return message.SerializeToString(deterministic=True)


MOST_GENERATIONS = 2**20
_COUNT_BITS, _FOUNDER_BITS, _VERSION_BITS = 20, 12, 32


def generation(term: int) -> int:
    """Return how often the part had been founded again when this term began."""
    return term >> (_COUNT_BITS + _FOUNDER_BITS)


def lineage(term: int) -> int:
    """Return the number of the founding that the term belongs to; 0 for the first one."""
    return term >> _COUNT_BITS


def last_term_before(generation: int, founder: bytes) -> int:
    """Return the number below the first term of a lineage. 0 in generation 0.

    founder: Names the peer that founds it.
    """
    mark = int.from_bytes(sha256(founder).digest()[:2], "big") >> (16 - _FOUNDER_BITS) if generation else 0
    return (generation << _FOUNDER_BITS | mark) << _COUNT_BITS


def term_text(term: int) -> str:
    """Return the term as text: `3`, or `2:3` for the third one of generation 2."""
    count = term & ((1 << _COUNT_BITS) - 1)
    return f"{generation(term)}:{count}" if generation(term) else str(term)


def stamp(generation: int, version: int) -> int:
    """Return the age of an anchor as one number, greater for a newer anchor; 0 for none."""
    return generation << _VERSION_BITS | version if version else 0


def generation_of(stamp: int) -> int:
    """Return the generation of the part that made the anchor."""
    return stamp >> _VERSION_BITS


def version_of(stamp: int) -> int:
    """Return the version of the anchor, as its generation counted them."""
    return stamp & ((1 << _VERSION_BITS) - 1)
