"""Convert votes to protocol buffers and back, and keep the register of a voter on disk."""

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.votes import Answer, Proposal, Voter
from aedit.system import write_atomically
from aedit.types import UserError

_BITS = 63


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


def answer_out(answer: Answer) -> pb.Answer:
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


def answer_in(message: pb.Answer) -> Answer:
    """Return the answer of a message."""
    ballot = message.ballot.term, message.ballot.number
    accepted = message.accepted.term, message.accepted.number
    return Answer(
        message.voter, message.proposer, ballot, message.granted, message.term, message.leads, accepted
    )


class VoterFile:
    """The register of a voter in a file, which is on disk when `save` returns; without a path, in memory.

    A voter without a file, or whose file is gone, is another voter than before: it has promised nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> Voter:
        """Return the register; a new voter if there is none. Raises UserError if the file is damaged."""
        if self._path is None or not self._path.exists():
            return Voter(secrets.randbits(_BITS) | 1)
        try:
            fields = json.loads(self._path.read_text())
            pairs = {name: tuple(fields[name]) for name in ("accepted", "seen")}
            return Voter(fields["me"], fields["term"], fields["voted_for"], **pairs)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path}: not the register of a voter ({error}); restore it, or delete it: this process"
                " is then another voter"
            ) from None

    def save(self, voter: Voter) -> None:
        """Write the register. Raises OSError."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(voter)))
