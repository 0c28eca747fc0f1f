"""The protocol as it was, one fault at a time, and other protocols that only look right."""

from aedit.async_sgd.replication import Replica
from aedit.async_sgd.replication.replica import END
from aedit.async_sgd.rules import Agreed, Configured
from aedit.proto.rpc import Voter
from kit.failover.hub import SimHub
from kit.failover.node import SimNode


class LeadsWhatItMirrored(Replica):
    """(a) A hub that followed leads after a restart, under the term in its journal."""

    def may_resume(self, journal_term):
        return journal_term > 0

    def resume(self, now):
        self.term = self.configs[-1].term
        alone = Configured(self.term, self.configs[-1].number + 1, self.voter.me, (self.voter.me,))
        self.configs = (alone,)
        return [alone, Agreed(*alone.ballot)]


class TakesOverWithoutRecords(Replica):
    """(b) A hub leads although it lacks records: voters do not ask for them, and neither does it."""

    def why_not(self, extent):
        return "" if self.configs else "it has no journal"


class Credulous(Voter):
    """(b) A voter that does not ask what a candidate has."""

    __slots__ = ()

    def answer(self, proposal, known_term=0):
        after, answer = Voter(self.me, self.term, self.voted_for).answer(proposal, known_term)
        return Credulous(after.me, after.term, after.voted_for, self.accepted, self.seen), answer


class GoesOnAlone(Replica):
    """(c) A leader that is cut off takes the silent replicas out by itself, and acknowledges."""

    def propose(self, replicas, electors):
        decided = super().propose(replicas, electors)
        if decided and self._agreement is not None and len(self.configs[-1].replicas) == 1:
            self.configs, self._agreement = self.configs[-1:], None
            return [*decided, Agreed(*self.configs[-1].ballot)]
        return decided


class AcknowledgesAlone(Replica):
    """A leader that acknowledges what only its own disk has."""

    def acknowledged(self):
        return END if self.term else (0, 0)


class NewestOnly(Replica):
    """Agreement by the newest configuration, without the ones before it."""

    def _ask_for_agreement(self):
        decided = super()._ask_for_agreement()
        if self._agreement is not None:
            self._agreement.configs = self.configs[-1:]
            own = self.voter.answer(self._agreement.proposal)[1]
            return self.count_acceptance(own, 0.0)
        return decided


class Appointed(SimHub):
    """A successor that leads because the leader says so, without a vote."""

    def on_stand(self, sender):
        if not self.machine.term and self.machine.configs:
            self.disk.mirrored = 0
            self._write(self.machine.force(self._term(), 1))
            self._save()


class YieldsToAnybody(Replica):
    """A leader that gives way to a hub that lacks records, and voters that do not ask for them."""

    def yield_to(self, replica, until_s):
        self._successor, self._yields_until_s = replica, until_s
        return bool(self.term)

    def why_not(self, extent):
        return "" if self.configs else "it has no journal"


class ComparesNothing(SimHub):
    """A leader that lets a follower keep all that it has."""

    def _has(self, log):
        return len(log) <= len(self.disk.log)


def hub_with(machine, *, voter=Voter, forgets=False):
    """Return a simulated hub whose state machine is `machine`."""

    class Mutant(SimHub):
        make = machine
        volatile_votes = forgets

        def __init__(self, world, number, hubs):
            super().__init__(world, number, hubs)
            self.disk.voter = voter(self.disk.voter.me)

    return Mutant


def node_with(*, voter=Voter, forgets=False):
    """Return a simulated node whose register is `voter`."""

    class Mutant(SimNode):
        volatile_votes = forgets

        def __init__(self, world, number, hubs):
            super().__init__(world, number, hubs)
            self.voter = voter(self.voter.me)

    return Mutant


class VotesTwice(Voter):
    """(d) A voter that votes for everybody who asks under one term."""

    __slots__ = ()

    def answer(self, proposal, known_term=0):
        term = min(self.term, proposal.term - 1) if not proposal.number else self.term
        before = Voter(self.me, term, proposal.proposer, self.accepted, self.seen)
        after, answer = before.answer(proposal, known_term)
        return VotesTwice(after.me, after.term, after.voted_for, after.accepted, after.seen), answer


MUTANTS = {
    "a: a restarted hub leads under a term that it only mirrored": (hub_with(LeadsWhatItMirrored), SimNode),
    "b: a candidate that lacks acknowledged records is elected": (
        hub_with(TakesOverWithoutRecords, voter=Credulous),
        node_with(voter=Credulous),
    ),
    "c: a hub that is cut off goes on alone": (hub_with(GoesOnAlone), SimNode),
    "d: a voter votes twice in one term": (hub_with(Replica, voter=VotesTwice), node_with(voter=VotesTwice)),
    "d: votes are not on disk before they are sent": (
        hub_with(Replica, forgets=True),
        node_with(forgets=True),
    ),
    "a leader acknowledges what only its own disk has": (hub_with(AcknowledgesAlone), SimNode),
    "a leader appoints its successor without a vote": (Appointed, SimNode),
    "a leader hands over to a hub that is not in sync": (
        hub_with(YieldsToAnybody, voter=Credulous),
        node_with(voter=Credulous),
    ),
    "a follower keeps records that the leader does not have": (ComparesNothing, SimNode),
    "a configuration needs no quorum of the one before": (hub_with(NewestOnly), SimNode),
}
"""By name: the simulated hub and node."""
