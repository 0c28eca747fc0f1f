"""Votes for the leader of a part: proposals, answers, and the register of a voter, on disk before it answers.

In a swarm a request is signed with the key of the peer that hosts the candidate.
"""

import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.keys import SigningKey, is_signed_by
from aedit.system import write_atomically
from aedit.types import UserError

Ballot = tuple[int, int]
"""Term, and number of the configuration within the term."""
Extent = tuple[int, int, int]
"""Term of the last leader in a journal, and segment and byte of the journal's end. A journal with a greater
extent has every acknowledged record that one with a smaller extent has."""

_BITS = 63


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
    leads: int = 0
    """Term that the voter itself leads; 0: it does not lead."""
    accepted: Ballot = (0, 0)
    """Newest configuration that the voter has accepted."""


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

    @classmethod
    def load(cls, path: Path | None) -> "Voter":
        """Return the state in a file; a new voter without a file, or if it is gone: it has promised nothing.

        Raises UserError if the file is damaged.
        """
        if path is None or not path.exists():
            return cls(secrets.randbits(_BITS) | 1)
        try:
            fields = json.loads(path.read_text())
            pairs = {name: tuple(fields[name]) for name in ("accepted", "seen")}
            return cls(fields["me"], fields["term"], fields["voted_for"], **pairs)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: not the register of a voter ({error}); restore it, or delete it: this process is"
                " then another voter"
            ) from None

    def save(self, path: Path | None) -> None:
        """Write the state; it is on disk on return. None: it is kept in memory only. Raises OSError."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(self)))

    def answer(self, proposal: Proposal) -> "tuple[Voter, VoteReply]":
        """Return the next state and the answer. The state must be on disk before the answer is sent."""
        after = self._granting(proposal)
        known = max(self.term, proposal.term if after is not None else 0)
        accepted = (after or self).accepted
        said = VoteReply(
            self.me, proposal.proposer, proposal.ballot, after is not None, known, accepted=accepted
        )
        return after or self, said

    def saw(self, extent: Extent) -> "Voter":
        """Return the state after records up to `extent` are known to be acknowledged."""
        return replace(self, seen=max(self.seen, extent))

    def _granting(self, proposal: Proposal) -> "Voter | None":
        if proposal.term < self.term:
            return None
        if proposal.term == self.term and self.voted_for != proposal.proposer:
            return None
        chosen = replace(self, term=proposal.term, voted_for=proposal.proposer)
        if proposal.number:
            return replace(chosen, accepted=max(self.accepted, proposal.ballot))
        if proposal.basis < self.accepted or proposal.extent < self.seen:
            return None  # the proposer may lack what was acknowledged
        return chosen


_VOTE_PURPOSE = b"aedit request for a vote 1\n"


def sign_request(request: pb.ProposeRequest, key: SigningKey) -> None:
    """Sign a request; it must not change afterwards."""
    request.public_key = key.public
    request.signature = key.private.sign(_signed_request(request))


def signer_of(request: pb.ProposeRequest) -> bytes:
    """Return the public key with which a request is signed; empty if it is not."""
    is_signed = is_signed_by(request.public_key, request.signature, _signed_request(request))
    return request.public_key if is_signed else b""


def _signed_request(request: pb.ProposeRequest) -> bytes:
    copy = pb.ProposeRequest()
    copy.CopyFrom(request)
    copy.ClearField("signature")
    return _VOTE_PURPOSE + copy.SerializeToString(deterministic=True)


def proposal_out(proposal: Proposal) -> pb.Proposal:
    """Return the message for a proposal."""
    term, segment, offset = proposal.extent
    return pb.Proposal(
        ballot=pb.Ballot(term=proposal.term, number=proposal.number),
        proposer=proposal.proposer,
        basis=pb.Ballot(term=proposal.basis[0], number=proposal.basis[1]),
        extent=pb.Extent(term=term, segment=segment, offset=offset),
    )


def proposal_in(message: pb.Proposal) -> Proposal:
    """Return the proposal of a message."""
    ballot, basis, extent = message.ballot, message.basis, message.extent
    return Proposal(
        ballot.term,
        ballot.number,
        message.proposer,
        (basis.term, basis.number),
        (extent.term, extent.segment, extent.offset),
    )


def answer_out(answer: VoteReply) -> pb.Answer:
    """Return the message for an answer."""
    return pb.Answer(
        voter=answer.voter,
        proposer=answer.proposer,
        ballot=pb.Ballot(term=answer.ballot[0], number=answer.ballot[1]),
        granted=answer.granted,
        term=answer.term,
        leads=answer.leads,
        accepted=pb.Ballot(term=answer.accepted[0], number=answer.accepted[1]),
    )


def answer_in(message: pb.Answer) -> VoteReply:
    """Return the answer of a message."""
    ballot = message.ballot.term, message.ballot.number
    accepted = message.accepted.term, message.accepted.number
    return VoteReply(
        message.voter, message.proposer, ballot, message.granted, message.term, message.leads, accepted
    )
