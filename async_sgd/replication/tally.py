"""Count the answers to one proposal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from aedit.async_sgd.replication.quorum import is_quorum
from aedit.async_sgd.rules import Configured
from aedit.proto.rpc import Answer, Proposal


@dataclass(slots=True)
class Tally:
    """Answers to `proposal`, which must be granted by a quorum of each of `configs`."""

    proposal: Proposal
    configs: Sequence[Configured]
    """Configurations that need a quorum each: the newest one that was agreed on, and all after it."""
    _granted: dict[int, float] = field(default_factory=dict)
    """Time of the answer, by voter."""

    def count(self, answer: Answer, now: float) -> bool:
        """Note an answer; return False if it belongs to another proposal or does not grant this one."""
        ours = (answer.proposer, answer.ballot) == (self.proposal.proposer, self.proposal.ballot)
        if ours and answer.granted:
            self._granted[answer.voter] = now
        return ours and answer.granted

    def granted(self, since_s: float = float("-inf")) -> dict[int, float]:
        """Return the voters that have granted the proposal since then, with the times."""
        return {voter: at_s for voter, at_s in self._granted.items() if at_s >= since_s}

    def voters(self, since_s: float = float("-inf")) -> set[int]:
        """Return the voters that have granted the proposal since then."""
        return set(self.granted(since_s))

    def is_carried(self, voters: set[int]) -> bool:
        """Return whether these voters are a quorum of every configuration."""
        return bool(self.configs) and all(is_quorum(config, voters) for config in self.configs)
