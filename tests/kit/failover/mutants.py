"""Production code with one mistake each: what a simulation must find."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from aedit.async_sgd.replication import Leadership, Mirror, Replica
from aedit.async_sgd.replication.replica import END
from aedit.async_sgd.rules import Agreed
from aedit.launch.hub.leading import LeadingHub
from aedit.proto.rpc import Voter
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


def sync(self):
    """Return what is written, and flush nothing."""
    return self.position


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


original_remove = Mirror._remove
original_propose, original_ask = Replica.propose, Replica._ask_for_agreement
original_forget = Leadership.forget

MUTANTS = {
    "a hub leads with an older copy of its folder": [
        (HubProcess, "_is_behind", lambda self, own: False),
        (Mirror, "_remove", remove),
    ],
    "a leader without room leads on": [(LeadingHub, "_resign", lambda self: None)],
    "no fdatasync before a confirmation": [(Mirror, "sync", sync)],
    "what is forgotten is not passed on": [(Replica, "forget", lambda self, confirmed: None)],
    "a follower that fetches anew forgets what it confirmed": [
        (Leadership, "forget", lambda self, confirmed: original_forget(self, (0, 0, 0)))
    ],
    "votes are never saved": [(Voter, "save", lambda self, path: None)],
    "a hub leads under a term that it only mirrored": [
        (Replica, "may_resume", lambda self, term: bool(self.configs))
    ],
    "a hub that is cut off goes on alone": [(Replica, "propose", propose)],
    "a leader acknowledges what only its own disk has": [
        (Replica, "acknowledged", lambda self: END if self.term else (0, 0))
    ],
    "a configuration needs no quorum of the one before": [(Replica, "_ask_for_agreement", ask_for_agreement)],
}
"""Attributes of production code and their replacements, by what is wrong with them."""
