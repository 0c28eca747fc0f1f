"""A node as a voter: it decides which of two hubs leads when they cannot."""

from aedit.proto.rpc import HubClient, VoterFile, answer_out, proposal_in
from aedit.proto.rpc import hub_pb2 as pb

_QUESTIONS = 4
"""Most proposals that are answered in a row: a vote, and the first configurations of the new leader."""


class Elector:
    """Votes of one node. Its promises are in the file before they are sent."""

    def __init__(self, file: VoterFile) -> None:
        self._file, self._voter = file, file.load()

    @property
    def identity(self) -> int:
        """Return the number under which the node votes."""
        return self._voter.me

    def offer(self, hub: HubClient, who: pb.Who, timeout_s: float) -> pb.TakeOverReply:
        """Answer everything that a hub asks; return its last reply.

        Raises HubUnreachable, HubRefused, or OSError if the promise cannot be written.
        """
        request = pb.TakeOverRequest(who=who, voter=self.identity)
        reply, asked = hub.take_over(request, timeout_s), None
        for _ in range(_QUESTIONS):
            if not reply.HasField("asks") or reply.asks == asked:
                break
            asked = reply.asks
            voter, answer = self._voter.answer(proposal_in(asked))
            if voter != self._voter:
                self._file.save(voter)
                self._voter = voter
            request.answer.CopyFrom(answer_out(answer))
            reply = hub.take_over(request, timeout_s)
        return reply
