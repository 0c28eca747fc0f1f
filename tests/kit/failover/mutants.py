"""Production code with one mistake each: what a simulation must find."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from aedit.async_sgd.journal import Journal, receipts
from aedit.async_sgd.replication import Leadership, Mirror, Replica, replica, stream_journal
from aedit.async_sgd.replication.replica import END
from aedit.async_sgd.rules import Agreed
from aedit.async_sgd.service import driver
from aedit.launch.hub.leading import LeadingHub
from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import Voter, votes


@contextmanager
def patched(*patches):
    with ExitStack() as held:
        for place, name, value in patches:
            held.enter_context(mock.patch.object(place, name, value))
        yield


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


def lead_on(self, configs):
    """Lead the term of the journal on, in the name of the process that was elected for it."""
    with self._deciding() as replica:
        replica.configs, replica.term, replica._process = configs, configs[-1].term, replica.voter.process
        replica._confirmed = dict.fromkeys(replica._needed(), ((0, 0), self._clock()))
        return replica._ask_for_agreement()


def leading_on(may_lead):
    """Return a beginning that leads the term of the journal on if `may_lead(its leader, register)`."""

    def begin(self, extent, configs, *, is_new):
        if configs and may_lead(configs[-1], self._replica.voter):
            return lead_on(self, configs)
        return original_begin(self, extent, configs, is_new=is_new)

    return begin


def send(self, journal_term, configs, answered):
    """Lead the old term on, and not only to send the journal, if no hub of a quorum has more."""
    asked = self._replica.copied()
    asked.configs = configs
    if configs:
        asked.send(journal_term, answered)
    if asked.only_sends:
        lead_on(self, configs)
    return self._replica.term > 0


def was_elected(config, voter):
    return (voter.term, voter.voted_for) == (config.term, config.leader) == (config.term, voter.me)


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


original_granting, original_answer = Voter._granting, Elector.answer
original_vote, original_propose, original_ask = Replica.answer, Replica.propose, Replica._ask_for_agreement
original_check = Journal._check
original_forget, original_begin = Leadership.forget, Leadership.begin
unbounded = [(place, "TERM_STEP", 2**62) for place in (replica, votes)]
believed = [(place, "check_signer", lambda message, voter: None) for place in (votes, driver)]

MUTANTS = {
    "a replica votes for a hub that has less of the journal": [
        (Replica, "answer", lambda self, proposal, now, extent=(0, 0, 0): original_vote(self, proposal, now))
    ],
    "a hub leads on though no replica says how much it has": [(Leadership, "begin", leading_on(was_elected))],
    "a copy of the leader's folder leads its term on": [
        (Leadership, "send", send),
        (Journal, "_check", lambda self, writes=False: original_check(self)),
    ],
    "a message counts for the voter that it names": believed,
    "the term of a refusal is believed without a bound": unbounded,
    "a vote is given before its write has succeeded": [(Leadership, "_deciding", deciding)],
    "a leader without room leads on": [(LeadingHub, "_resign", lambda self, reason: None)],
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
        (Leadership, "begin", leading_on(lambda config, voter: True))
    ],
    "a hub that is cut off goes on alone": [(Replica, "propose", propose)],
    "a leader acknowledges what only its own disk has": [
        (Replica, "acknowledged", lambda self: END if self.term else (0, 0))
    ],
    "a configuration needs no quorum of the one before": [(Replica, "_ask_for_agreement", ask_for_agreement)],
}
"""Attributes of production code and their replacements, by what is wrong with them."""
