"""The register of a voter: what it has promised. It is on disk before an answer is sent."""

from dataclasses import dataclass, replace

Ballot = tuple[int, int]
"""Term, and number of the configuration within the term."""
Extent = tuple[int, int, int]
"""Term of the last leader in a journal, and segment and byte of the journal's end. A journal with a greater
extent has every acknowledged record that one with a smaller extent has."""


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
class Answer:
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

    def answer(self, proposal: Proposal) -> "tuple[Voter, Answer]":
        """Return the next state and the answer. The state must be on disk before the answer is sent."""
        after = self._granting(proposal)
        known = max(self.term, proposal.term if after is not None else 0)
        accepted = (after or self).accepted
        said = Answer(
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
