"""Production code with one mistake each: what a simulation must find."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from aedit.async_sgd.journal import receipts
from aedit.async_sgd.replication import Leadership, Mirror, Replica, replica, stream_journal
from aedit.async_sgd.replication.replica import END
from aedit.async_sgd.rules import Agreed
from aedit.async_sgd.service import driver
from aedit.launch.hub.endpoint import OtherHubs
from aedit.launch.hub.leading import LeadingHub
from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import Voter, votes


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
    journal = Instead(ledger.journal, sync=lambda position: None)
    return stream_journal(Instead(ledger, journal=journal), request, check_leads)


def granting(self, proposal):
    """Vote for a proposer without what was acknowledged."""
    after = original_granting(replace(self, accepted=(0, 0), seen=(0, 0, 0)), proposal)
    return after and replace(after, accepted=max(self.accepted, after.accepted), seen=self.seen)


def granting_twice(self, proposal):
    """Vote for everybody who asks under one term."""
    free = not proposal.number and self.term == proposal.term
    freed = replace(self, voted_for=proposal.proposer, process=proposal.process) if free else self
    return original_granting(freed, proposal)


def answer(self, asks, term, seen=(0, 0, 0)):
    """Vote without regard to receipts."""
    return original_answer(self, asks, term)


def propose(self, replicas, electors):
    """Take silent replicas out without an agreement, and acknowledge."""
    decided = original_propose(self, replicas, electors)
    if decided and self._agreement is not None and len(self.configs[-1].replicas) == 1:
        self.configs, self._agreement = self.configs[-1:], None
        return [*decided, Agreed(*self.configs[-1].ballot)]
    return decided


def may_resume(self, journal_term, answered):
    """Lead on without any answer."""
    return original_may_resume(self, journal_term, self._needed())


def ask_for_agreement(self):
    """Ask for a quorum of the newest configuration, and not of those before it."""
    decided = original_ask(self)
    if self._agreement is not None:
        self._agreement.configs = self.configs[-1:]
        return self.count_acceptance(self.voter.answer(self._agreement.proposal)[1], 0.0)
    return decided


def has(self, position, chain):
    """Compare lengths only."""
    return position <= self._journal.position


original_remove, original_granting, original_answer = Mirror._remove, Voter._granting, Elector.answer
original_propose, original_ask = Replica.propose, Replica._ask_for_agreement
original_forget, original_may_resume = Leadership.forget, Replica.may_resume
unbounded = [(place, "TERM_STEP", 2**62) for place in (replica, votes)]
believed = [(place, "check_signer", lambda message, voter: None) for place in (votes, driver)]

MUTANTS = {
    "a hub leads with an older copy of its folder": [
        (OtherHubs, "ahead_of", lambda self, own: self.compared.update(self.voters)),
        (Mirror, "_remove", remove),
    ],
    "a hub leads on though no replica says how much it has": [(Replica, "may_resume", may_resume)],
    "a message counts for the voter that it names": believed,
    "the term of a refusal is believed without a bound": unbounded,
    "a vote is given before its write has succeeded": [(Leadership, "_deciding", deciding)],
    "a leader without room leads on": [(LeadingHub, "_resign", lambda self: None)],
    "a leader that has given up its lease asks for votes at once": [
        (Replica, "resign", lambda self, now: self.step_down())
    ],
    "no fdatasync before a confirmation": [(Mirror, "sync", sync)],
    "a leader streams what it has not synced": [(driver, "stream_journal", stream)],
    "other records are not compared": [(receipts.Receipts, "has", has)],
    "what is forgotten is not passed on": [(Replica, "forget", lambda self, confirmed: None)],
    "a follower that fetches anew forgets what it confirmed": [
        (Leadership, "forget", lambda self, confirmed: original_forget(self, (0, 0, 0)))
    ],
    "votes are never saved": [(Voter, "save", lambda self, path: None)],
    "a voter votes twice in one term": [(Voter, "_granting", granting_twice)],
    "a voter ignores what was acknowledged": [(Voter, "_granting", granting)],
    "a node votes without regard to its receipts": [(Elector, "answer", answer)],
    "a hub leads under a term that it only mirrored": [
        (Replica, "may_resume", lambda self, term, answered: bool(self.configs))
    ],
    "a hub that is cut off goes on alone": [(Replica, "propose", propose)],
    "a leader acknowledges what only its own disk has": [
        (Replica, "acknowledged", lambda self: END if self.term else (0, 0))
    ],
    "a configuration needs no quorum of the one before": [(Replica, "_ask_for_agreement", ask_for_agreement)],
}
"""Attributes of production code and their replacements, by what is wrong with them."""
