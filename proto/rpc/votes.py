"""Votes for the leader of a part: proposals, answers, and the register of a voter, on disk before it answers.

The identity of a voter follows from its public key. What it proposes, answers or confirms is signed with
that key, and counts for no other voter. In a swarm a request for votes is also signed with the key of the
peer that hosts the candidate.
"""

import json
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from google.protobuf.message import Message

from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.keys import SigningKey, is_signed_by
from aedit.proto.rpc.statement import MOST_GENERATIONS
from aedit.system import write_atomically
from aedit.types import UserError

Ballot = tuple[int, int]
"""Term, and number of the configuration within the term."""
Extent = tuple[int, int, int]
"""Term of the last leader in a journal, and segment and byte of the journal's end. A journal with a greater
extent has every acknowledged record that one with a smaller extent has."""


MOST_TERM = MOST_GENERATIONS << 32
"""Above every term; see statement.py for the parts of a term."""
TERM_STEP = 1024
"""By so much at most does one message of another hub or node raise a term, whatever it names."""
_MOST_NUMBER, _MOST_POSITION = 2**32, 2**63


def identity_of(public_key: bytes) -> int:
    """Return the identity of the voter with this key: 63 bits of its hash, never 0."""
    return int.from_bytes(sha256(b"aedit voter 1\n" + public_key).digest()[:8], "big") >> 1 or 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """A request to a voter: to vote for a leader, or to accept a configuration of the leader."""

    term: int
    number: int
    """Number of the configuration within its term; 0 asks for a vote."""
    proposer: int
    basis: Ballot
    """Newest configuration in the proposer's journal."""
    extent: Extent = (0, 0, 0)
    """End of the proposer's journal."""
    process: int = 0
    """Number that the process of the proposer drew: one of two with one folder leads a term.

    0: of an older build."""

    @property
    def ballot(self) -> Ballot:
        """Return the ballot of the configuration."""
        return self.term, self.number


@dataclass(frozen=True, slots=True)
class VoteReply:
    """The answer of one voter to a proposal."""

    voter: int
    proposer: int
    ballot: Ballot
    granted: bool
    term: int
    """Highest term that the voter has promised."""
    accepted: Ballot = (0, 0)
    """Newest configuration that the voter has accepted."""
    process: int = 0
    """Of the proposal; 0: of an older build, which counts only once per identity."""


@dataclass(frozen=True, slots=True)
class Voter:
    """Promises of a voter; `answer` returns the next state."""

    me: int
    term: int = 0
    """Highest term for which it has voted, or whose configuration it has accepted."""
    voted_for: int = 0
    """The only proposer of that term which it supports."""
    accepted: Ballot = (0, 0)
    """Newest configuration that it has accepted."""
    seen: Extent = (0, 0, 0)
    """Newest extent that it knows to be acknowledged."""
    key: str = field(default="", repr=False)
    """Its private key, in hexadecimal. `me` follows from it, so that a lost register makes another voter."""
    process: int = 0
    """The only process of `voted_for` which it supports in that term, see `Proposal.process`."""

    @classmethod
    def load(cls, path: Path | None) -> "Voter":
        """Return the state in a file; a new voter without a file, or if it is gone: it has promised nothing.

        Raises UserError if the file is damaged.
        """
        if path is None or not path.exists():
            made = SigningKey()
            return cls(identity_of(made.public), key=made.private.private_bytes_raw().hex())
        try:
            kept = json.loads(path.read_text())
            pairs = {name: tuple(kept[name]) for name in ("accepted", "seen")}
            key, process = kept["key"], kept.get("process", 0)  # older builds write no process
            voter = cls(kept["me"], kept["term"], kept["voted_for"], key=key, process=process, **pairs)
            if identity_of(voter.signing_key.public) != voter.me:
                raise ValueError("its key is that of another voter")
            return voter
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: not the register of a voter ({error}); restore it, or delete it: this process is"
                " then another voter"
            ) from None

    def save(self, path: Path | None) -> None:
        """Write the state; it is on disk on return. None: it is kept in memory only. Raises OSError."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {each.name: getattr(self, each.name) for each in fields(self)}
            write_atomically(path, json.dumps(content), mode=0o600)

    @property
    def signing_key(self) -> SigningKey:
        """Return the key with which it signs. Raises ValueError if it has none."""
        return SigningKey(bytes.fromhex(self.key))

    def answer(self, proposal: Proposal, known_term: int = 0) -> "tuple[Voter, VoteReply]":
        """Return the next state and the answer. The state must be on disk before the answer is sent.

        A term that is too far above what is known is refused, and raises the promise by `TERM_STEP` only.

        known_term: of the hub or journal that this voter follows.
        """
        nearest = max(self.term, self.seen[0], known_term) + TERM_STEP
        if proposal.term > nearest:
            raised = replace(self, term=nearest, voted_for=0, process=0)
            return raised, VoteReply(
                self.me, proposal.proposer, proposal.ballot, False, nearest, process=proposal.process
            )
        after = self._granting(proposal)
        known = max(self.term, proposal.term if after is not None else 0)
        accepted = (after or self).accepted
        ballot, granted, process = proposal.ballot, after is not None, proposal.process
        return after or self, VoteReply(self.me, proposal.proposer, ballot, granted, known, accepted, process)

    def saw(self, extent: Extent) -> "Voter":
        """Return the state after records up to `extent` are known to be acknowledged."""
        return replace(self, seen=max(self.seen, extent))

    def _granting(self, proposal: Proposal) -> "Voter | None":
        if proposal.term < self.term:
            return None
        proposer, process = proposal.proposer, proposal.process
        # An older build has noted no process: this voter may have been upgraded within the term.
        is_same = proposer == self.voted_for and self.process in (0, process)
        if proposal.term == self.term and not is_same:
            return None
        chosen = replace(self, term=proposal.term, voted_for=proposer, process=process)
        if proposal.number:
            return replace(chosen, accepted=max(self.accepted, proposal.ballot))
        if proposal.basis < self.accepted or proposal.extent < self.seen:
            return None  # the proposer may lack what was acknowledged
        return chosen


Signed: TypeAlias = pb.ProposeRequest | pb.Proposal | pb.Answer | pb.ConfirmRequest
_PURPOSES: dict[type[Message], bytes] = {
    pb.ProposeRequest: b"aedit request for a vote 1\n",
    pb.Proposal: b"aedit proposal of a hub 1\n",
    pb.Answer: b"aedit answer of a voter 1\n",
    pb.ConfirmRequest: b"aedit confirmation of a standby 1\n",
}


def sign(message: Signed, key: SigningKey) -> None:
    """Sign a message; it must not change afterwards."""
    message.public_key = key.public
    message.ClearField("signature")
    message.signature = key.private.sign(_signed_bytes(message))


def signer_of(message: Signed) -> bytes:
    """Return the public key with which a message is signed; empty if it is not."""
    unsigned: Message = type(message)()
    unsigned.CopyFrom(message)
    unsigned.ClearField("signature")
    is_signed = is_signed_by(message.public_key, message.signature, _signed_bytes(unsigned))
    return message.public_key if is_signed else b""


def check_signer(message: Signed, identity: int) -> None:
    """Raise ValueError unless the voter with this identity has signed the message."""
    signer = signer_of(message)
    if not signer or identity_of(signer) != identity:
        raise ValueError(
            f"{type(message).__name__} in the name of the voter {identity} is not signed with its key"
        )


def _signed_bytes(unsigned: Message) -> bytes:
    return _PURPOSES[type(unsigned)] + unsigned.SerializeToString(deterministic=True)


def proposal_out(proposal: Proposal, key: SigningKey) -> pb.Proposal:
    """Return the message for a proposal, signed with the key of the proposer."""
    term, segment, offset = proposal.extent
    message = pb.Proposal(
        ballot=pb.Ballot(term=proposal.term, number=proposal.number),
        proposer=proposal.proposer,
        basis=pb.Ballot(term=proposal.basis[0], number=proposal.basis[1]),
        extent=pb.Extent(term=term, segment=segment, offset=offset),
        process=proposal.process,
    )
    sign(message, key)
    return message


def proposal_in(message: pb.Proposal) -> Proposal:
    """Return the proposal of a message.

    Raises ValueError if its numbers are out of range, or the proposer has not signed it.
    """
    _check_range(message, message.ballot, message.basis)
    for name, value, most in (
        ("extent.term", message.extent.term, MOST_TERM),
        ("extent.segment", message.extent.segment, _MOST_POSITION),
        ("extent.offset", message.extent.offset, _MOST_POSITION),
    ):
        _check_number(message, name, value, most)
    check_signer(message, message.proposer)
    ballot, basis, extent = message.ballot, message.basis, message.extent
    return Proposal(
        ballot.term,
        ballot.number,
        message.proposer,
        (basis.term, basis.number),
        (extent.term, extent.segment, extent.offset),
        message.process,
    )


def answer_out(answer: VoteReply, key: SigningKey) -> pb.Answer:
    """Return the message for an answer, signed with the key of the voter."""
    message = pb.Answer(
        voter=answer.voter,
        proposer=answer.proposer,
        ballot=pb.Ballot(term=answer.ballot[0], number=answer.ballot[1]),
        granted=answer.granted,
        term=answer.term,
        accepted=pb.Ballot(term=answer.accepted[0], number=answer.accepted[1]),
        process=answer.process,
    )
    sign(message, key)
    return message


def offer_out(key: SigningKey, term: int = 0) -> pb.Answer:
    """Return an answer to nothing, which shows the identity of the voter with this key, and what it promised.

    term: highest one that it has promised.
    """
    return answer_out(VoteReply(identity_of(key.public), 0, (0, 0), False, term), key)


def answer_in(message: pb.Answer) -> VoteReply:
    """Return the answer of a message.

    Raises ValueError if its numbers are out of range, or the voter has not signed it.
    """
    _check_range(message, message.ballot, message.accepted)
    _check_number(message, "term", message.term, MOST_TERM)
    check_signer(message, message.voter)
    ballot = message.ballot.term, message.ballot.number
    accepted = message.accepted.term, message.accepted.number
    return VoteReply(
        message.voter, message.proposer, ballot, message.granted, message.term, accepted, message.process
    )


def _check_range(message: Message, *ballots: pb.Ballot) -> None:
    for ballot in ballots:
        _check_number(message, "ballot.term", ballot.term, MOST_TERM)
        _check_number(message, "ballot.number", ballot.number, _MOST_NUMBER)


def _check_number(message: Message, name: str, value: int, most: int) -> None:
    if value >= most:
        raise ValueError(f"{type(message).__name__}: {name} is {value}; expected a number below {most}")
