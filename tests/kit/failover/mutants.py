"""Production code with one mistake each: what a simulation must find."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from aedit.async_sgd.journal import Store, receipts
from aedit.async_sgd.replication import Leadership, Mirror, Replica, replica, stream_journal
from aedit.async_sgd.replication.replica import END
from aedit.async_sgd.rules import Agreed
from aedit.async_sgd.service import driver
from aedit.launch.hub.leading import LeadingHub
from aedit.launch.hub.standby import Standby
from aedit.proto.rpc import Voter, votes
from aedit.proto.rpc import hub_pb2 as pb
from kit.failover.hub import HubProcess


@contextmanager
def patched(*patches):
    with ExitStack() as held:
        for place, name, value in patches:
            held.enter_context(mock.patch.object(place, name, value))
        yield


def remove(self, segment=0, offset=0, *, keep):
    """Delete what the leader does not have."""
    original_remove(self, segment, offset, keep=False)


@contextmanager
def deciding(self):
    """Decide on the state itself, and write it down afterwards."""
    with self._change:
        before = self._replica.voter
        self._replica.least = self._least()
        yield self._replica
        if self._replica.voter != before:
            self._save(self._replica.voter)
        self._change.notify_all()


def sync(self):
    """Return what is written, and flush nothing."""
    return self.position


class Instead:
    """Another object, but for some attributes."""

    def __init__(self, other, **own):
        self.__dict__.update(own, _other=other)

    def __getattr__(self, name):
        return getattr(self._other, name)


def stream(ledger, request, check_leads):
    """Stream what is written, and flush nothing."""
    return stream_journal(
        Instead(ledger, journal=Instead(ledger.journal, sync=lambda position: None)), request, check_leads
    )


def confirm(self, request):
    """Count a confirmation of whatever term."""
    self._guard.check_term(request.term)
    if not request.replica:
        return pb.ConfirmReply()
    stand = self._guard.leadership.confirm(request.replica, (request.segment, request.offset), "")
    return pb.ConfirmReply(stand=stand)


def granting(self, proposal):
    """Vote for a proposer without what was acknowledged."""
    return original_granting(Voter(self.me, self.term, self.voted_for, key=self.key), proposal)


def granting_twice(self, proposal):
    """Vote for everybody who asks under one term."""
    if proposal.number:
        return original_granting(self, proposal)
    lower = Voter(self.me, min(self.term, proposal.term - 1), 0, self.accepted, self.seen, key=self.key)
    return original_granting(lower, proposal)


def propose(self, replicas, electors):
    """Take silent replicas out without an agreement, and acknowledge."""
    decided = original_propose(self, replicas, electors)
    if decided and self._agreement is not None and len(self.configs[-1].replicas) == 1:
        self.configs, self._agreement = self.configs[-1:], None
        return [*decided, Agreed(*self.configs[-1].ballot)]
    return decided


def ask_for_agreement(self):
    """Ask for a quorum of the newest configuration, and not of those before it."""
    decided = original_ask(self)
    if self._agreement is not None:
        self._agreement.configs = self.configs[-1:]
        return self.count_acceptance(self.voter.answer(self._agreement.proposal)[1], 0.0)
    return decided


original_remove, original_granting = Mirror._remove, Voter._granting
original_propose, original_ask = Replica.propose, Replica._ask_for_agreement
original_forget, original_recover = Leadership.forget, Store.recover

MUTANTS = {
    "a hub leads with an older copy of its folder": [
        (HubProcess, "_is_behind", lambda self, own: False),
        (Mirror, "_remove", remove),
    ],
    "an answer counts for the voter that it names": [(votes, "check_signer", lambda message, voter: None)],
    "the term of a refusal is believed without a bound": [
        (replica, "TERM_STEP", 2**62),
        (votes, "TERM_STEP", 2**62),
    ],
    "a vote is given before its write has succeeded": [(Leadership, "_deciding", deciding)],
    "a leader without room leads on": [(LeadingHub, "_resign", lambda self: None)],
    "no fdatasync before a confirmation": [(Mirror, "sync", sync)],
    "a leader streams what it has not synced": [(driver, "stream_journal", stream)],
    "confirmations of another term are counted": [(driver.Driver, "confirm", confirm)],
    "other records are not compared": [
        (receipts.Receipts, "has", lambda self, position, chain: position <= self._journal.position)
    ],
    "what is forgotten is not passed on": [(Replica, "forget", lambda self, confirmed: None)],
    "a follower that fetches anew forgets what it confirmed": [
        (Leadership, "forget", lambda self, confirmed: original_forget(self, (0, 0, 0)))
    ],
    "votes are never saved": [(Voter, "save", lambda self, path: None)],
    "a candidate ignores what was acknowledged": [
        (Replica, "why_not", lambda self, extent: "" if self.configs else "it has no journal")
    ],
    "a voter ignores what was acknowledged": [(Voter, "_granting", granting)],
    "a voter votes twice in one term": [(Voter, "_granting", granting_twice)],
    "a hub leads under a term that it only mirrored": [
        (Replica, "may_resume", lambda self, term: bool(self.configs))
    ],
    "a hub that is cut off goes on alone": [(Replica, "propose", propose)],
    "a leader acknowledges what only its own disk has": [
        (Replica, "acknowledged", lambda self: END if self.term else (0, 0))
    ],
    "a configuration needs no quorum of the one before": [(Replica, "_ask_for_agreement", ask_for_agreement)],
    "the end of a copy is judged as that of a leader": [
        (Store, "recover", lambda self, hub, is_copy=False, **more: original_recover(self, hub, **more))
    ],
    "a follower goes on after a damaged chunk": [(Standby, "_fetch_anew", lambda self, error: None)],
}
"""Attributes of production code and their replacements, by what is wrong with them."""
