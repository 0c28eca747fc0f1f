"""One hub among those that may lead a run: a follower, a candidate or the leader.

`docs/protocol.md` has the rules and why they suffice. Times are read by the caller, on one monotonic clock.
They only decide when a hub asks: what is acknowledged does not depend on them.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from aedit.async_sgd.rules import Agreed, Configured, Led
from aedit.proto.rpc import TERM_STEP, Ballot, Extent, Proposal, Voter, VoteReply

Position = tuple[int, int]
"""Segment and byte of a journal."""
END: Position = (2**63, 0)
"""After every position."""
Decided = list[Led | Configured | Agreed]


class Replica:
    """The leadership of one hub. Its `voter` must be on disk before what a method returns is used."""

    def __init__(self, voter: Voter, *, promise_s: float, lease_s: float, process: int = 0) -> None:
        """Create a follower. promise_s: how long it supports a leader after its last message.

        lease_s: a leader whose replicas were silent for longer gives way to a candidate; below promise_s.
        process: number that this process drew; see `Proposal.process`.
        """
        if not 0 < lease_s < promise_s:
            raise ValueError(
                f"lease_s = {lease_s}: expected a value above 0 and below promise_s = {promise_s}"
            )
        self.voter, self._promise_s, self._lease_s, self._process = voter, promise_s, lease_s, process
        self.configs: tuple[Configured, ...] = ()
        """Configurations in its journal, from the newest one that the voters are known to have agreed on."""
        self.least = 1
        """Size below which a leader takes no replica out, silent or not, until another one has caught up.

        Else a single disk would have what is acknowledged next. It changes with the number of machines."""
        self.term = 0
        """The term that it leads; 0: it does not lead."""
        self.only_sends = False
        """True if it leads its old term on without room on its disk; see `send`."""
        self._known_term = 0
        """Highest term that any voter has named."""
        self.is_overtaken = False
        """True if voters that it needs support another hub: this leader must be elected again."""
        self._leader_at_s = self._yielded_s = self._yields_until_s = float("-inf")
        self._follows_since_s = float("-inf")
        self._successor = self._followed = 0
        self._supported = 0
        self._former: frozenset[int] = frozenset()
        """Replicas that this leader has taken out."""
        self._votes: VoteCount | None = None
        self._accepted: dict[int, Ballot] = {}
        """Newest configuration that a voter has accepted, by voter, as of its last answer."""
        self._agreement: VoteCount | None = None
        self._refusing: frozenset[int] = frozenset()
        """Voters that refuse the newest configuration: of a higher term, or with another vote in this one."""
        self._confirmed: dict[int, tuple[Position, float]] = {}
        self._placed: Position = END
        """End of the newest configuration in the journal, once that is on disk."""

    def copied(self) -> "Replica":
        """Return a copy on which may be decided what counts only once it is on disk."""
        made = Replica.__new__(Replica)  # `copy` takes four times as long, and each message needs one
        vars(made).update(vars(self))
        made._accepted, made._confirmed = dict(self._accepted), dict(self._confirmed)
        made._votes = self._votes and self._votes.copied()
        made._agreement = self._agreement and self._agreement.copied()
        return made

    # --- beginning

    def found(self, journal_term: int) -> Decided:
        """Lead a run of which no other hub can have a record; return the records to write."""
        return self._begin(journal_term + 1)

    def begin_alone(self, extent: Extent, now: float) -> Decided:
        """Lead a new term by its own vote, if that is a quorum; return the records to write.

        A process that starts never leads the term of the one before, which may run on: its folder may be a
        copy. Returns [] if other voters are needed, or this hub lacks something.

        extent: of its journal.
        """
        if self.why_not(extent) or not self.is_elected_by({self.voter.me}):
            return []
        asked = self.stand(extent, now)
        return self.count_vote(self.voter.answer(asked, asked.term)[1], now)

    def send(self, journal_term: int, answered: Set[int]) -> None:
        """Lead the old term on, only to let others fetch the journal, if they have no more than this hub.

        Nothing is written or acknowledged: the process that was elected for this term may run on. Not if the
        register names another vote, or a newer configuration than the journal.

        answered: hubs that have said how much of the journal they have, none of them more than this one.
            They and this one must be a quorum without any node.
        """
        newest, voter = self.configs[-1], self.voter
        was_elected = (newest.term, newest.leader) == (journal_term, voter.me)
        has_promised = (voter.term, voter.voted_for) == (journal_term, voter.me)
        if was_elected and has_promised and voter.accepted <= newest.ballot:
            self.only_sends = self.is_elected_by({voter.me, *answered})
            self.term = newest.term if self.only_sends else 0

    def is_elected_by(self, voters: Container[int]) -> bool:
        """Return whether these voters are a quorum of every configuration that counts."""
        return all(is_quorum(one, voters) for one in self.configs)

    def force(self, journal_term: int, jump: int) -> Decided:
        """Lead without a vote, as an operator has decided; return the records to write.

        jump: by how much the term exceeds all known ones, so that no election comes to the same term.
        """
        records = self._begin(max(journal_term, self.voter.term, self._known_term) + jump)
        newest = self.configs[-1]
        self.configs, self._agreement = (newest,), None
        forced = Agreed(*newest.ballot)
        return records if forced in records else [*records, forced]

    # --- voting

    def note_leader(self, now: float) -> None:
        """Note a message from the leader whose journal is followed. A new one is given time."""
        newest = self.configs[-1] if self.configs else Configured(0, 0, 0, ())
        self._leader_at_s, self._supported = now, newest.leader
        if newest.term > self._followed:
            self._followed, self._follows_since_s = newest.term, now

    def drop_leader(self) -> None:
        """Note that the leader cannot be followed any more: it is given no more time."""
        self._follows_since_s = float("-inf")

    def leader_ended(self) -> None:
        """Note that the leader has said that it leads no more: it needs no support against others."""
        self._leader_at_s = float("-inf")

    def may_confirm(self, term: int) -> bool:
        """Return whether records of the leader of `term` may be confirmed to it."""
        return not self.term and self.voter.term <= term

    def forget(self, confirmed: Extent) -> None:
        """Note that the followed journal is fetched anew: this hub is no candidate before `confirmed`."""
        self.voter, self.configs, self._votes = self.voter.saw(confirmed), (), None

    def answer(self, proposal: Proposal, now: float, extent: Extent = (0, 0, 0)) -> VoteReply:
        """Return the answer to another hub.

        A leader gives way, and a configuration is accepted, only if that hub is a replica as far as the
        journal here goes. A follower may vote for one that it does not know: its journal may end too early.

        extent: of the journal of a follower, which votes for none that has less: it has confirmed its records
            to a leader, which counted on them, unless no configuration that it knows has it.
        """
        is_known = not self.configs or any(proposal.proposer in one.replicas for one in self.configs)
        is_refused = not is_known and (self.term > 0 or proposal.number > 0)
        if is_refused or (not proposal.number and self._prefers_another(proposal, now, extent)):
            return VoteReply(self.voter.me, proposal.proposer, proposal.ballot, False, self.voter.term)
        known = self.configs[-1].term if self.configs else 0
        self.voter, answer = self.voter.answer(proposal, known)
        if answer.granted and self.term and proposal.term > self.term:
            self.step_down()
        if answer.granted and not proposal.number:
            self._leader_at_s, self._supported, self._yielded_s = now, proposal.proposer, now
        return answer

    def _prefers_another(self, proposal: Proposal, now: float, extent: Extent) -> bool:
        """Return whether another hub leads, or this one has records that the proposer lacks.

        The folder of the proposer may be an older copy.
        """
        if self.term:
            lacks = proposal.extent < (self.term, *self.acknowledged()) < (self.term, *END)
            return (self.holds_lease(now) or lacks) and not self.yields_to(proposal.proposer, now)
        if proposal.proposer != self._supported and now - self._leader_at_s < self._promise_s:
            return True
        counts = not self.configs or any(self.voter.me in one.replicas for one in self.configs)
        return proposal.extent < extent and counts

    # --- becoming the leader

    def why_not(self, extent: Extent) -> str:
        """Return why this hub cannot become the leader; empty if it can be elected."""
        newest = self.configs[-1] if self.configs else None
        if newest is None or self.voter.me not in newest.replicas:
            return "its journal is not complete: the hub that leads did not wait for it"
        if newest.ballot < self.voter.accepted:
            return (
                f"its journal ends before configuration {self.voter.accepted}, on which the hubs have agreed"
            )
        if extent < self.voter.seen:
            return f"its journal ends at {extent}, before {self.voter.seen}, which was acknowledged"
        return ""

    def may_stand(self, now: float) -> bool:
        """Return whether this hub may ask for votes: not soon after another had its vote or began to lead."""
        return now - max(self._yielded_s, self._follows_since_s) >= self._promise_s

    def stand(self, extent: Extent, now: float) -> Proposal:
        """Return the request for votes of a hub that can become the leader, with what its journal has now.

        A voter that refuses for a higher term has it ask under another one, but not before others had time
        to answer: else one voter could raise the term, and void all votes, with each message.
        """
        least = max(self.voter.term, extent[0], self.configs[-1].term)
        votes = self._votes if self._votes is not None and self._votes.proposal.term > least else None
        if votes is not None and self._known_term >= votes.proposal.term:
            votes = votes if now - votes.began_s < self._lease_s else None
        term = max(least, self._known_term) + 1 if votes is None else votes.proposal.term
        asked = Proposal(term, 0, self.voter.me, self.configs[-1].ballot, extent, self._process)
        self._votes = votes or VoteCount(asked, self.configs, now)
        self._votes.proposal, self._votes.configs = asked, self.configs
        return asked

    def withdraw(self) -> None:
        """Ask for no votes any more, and count none that are on their way."""
        self._votes = None

    def count_vote(self, answer: VoteReply, now: float, since_s: float = float("-inf")) -> Decided:
        """Count a vote; return the records with which this hub begins to lead, once it is elected.

        since_s: votes given earlier do not count; their voters may have found the leader again.
        """
        if not self._is_answered_by(answer):
            return []
        self._accepted[answer.voter] = answer.accepted
        if self._votes is None or not self._votes.count(answer, now):
            self._learn(answer, self._votes)
            return []
        known: Decided = self._agreed_by_answers()
        votes, self._votes.configs = self._votes, self.configs
        if not votes.is_carried(votes.voters(since_s) | {self.voter.me}):
            return []
        self.voter, own = self.voter.answer(votes.proposal, votes.proposal.term)
        if not own.granted:
            self._votes = None
            return []
        return [*known, *self._begin(votes.proposal.term, votes.granted(since_s))]

    def _agreed_by_answers(self) -> Decided:
        """Count only the newest configuration if the answers show that the voters have agreed on it.

        The leader may have ended before it could write that down. It has accepted what it has proposed.
        """
        newest = self.configs[-1:]
        if not newest or len(self.configs) == 1:
            return []
        known = {*self._accepted.items(), (self.voter.me, self.voter.accepted)}
        accepted = {newest[0].leader, *(voter for voter, ballot in known if ballot == newest[0].ballot)}
        if not all(is_quorum(config, accepted) for config in self.configs):
            return []
        self.configs = newest
        return [Agreed(*newest[0].ballot)]

    def _begin(self, term: int, voters: Mapping[int, float] = MappingProxyType({})) -> Decided:
        """Lead with the replicas that have voted for it, by the time of their votes, or more up to `least`.

        Those are alive and have nearly all of its journal: what is acknowledged is on several disks at once.
        """
        me, newest = self.voter.me, self.configs[-1] if self.configs else Configured(0, 0, 0, ())
        follow = {one: at_s for one, at_s in voters.items() if one in newest.replicas and one != me}
        replicas = self._decidable(self._enough({me, *follow}, newest.replicas), newest.electors)
        self.term, self._votes = term, None
        self._confirmed = {one: ((0, 0), at_s) for one, at_s in follow.items()}
        self.configs = (*self.configs, Configured(term, 1, me, replicas, newest.electors))
        return [Led(term), self.configs[-1], *self._ask_for_agreement()]

    def _decidable(self, replicas: Iterable[int], electors: tuple[int, ...]) -> tuple[int, ...]:
        """Return the replicas in order, or this one alone if no elector could decide between two halves."""
        ordered = tuple(sorted(set(replicas)))
        return ordered if len(ordered) % 2 or electors else (self.voter.me,)

    def note_promise(self, replica: int, term: int, *, is_hub: bool = False) -> None:
        """Note that a replica has promised a term. It confirms nothing to a leader of a lower one.

        Such a leader must be elected again, unless another hub is: also for a replica that was taken out,
        which could not be counted again else.

        is_hub: it is a hub of the run, whether a configuration names it or not.
        """
        if is_hub or replica in self._former or any(replica in one.replicas for one in self.configs):
            self._known_term = max(self._known_term, min(term, self.term + TERM_STEP))
            self.is_overtaken = self.is_overtaken or term > self.term > 0

    # --- leading

    @property
    def is_agreed(self) -> bool:
        """Return whether it leads, and the voters have agreed on its newest configuration."""
        return bool(self.term) and self._agreement is None

    def holds_lease(self, now: float) -> bool:
        """Return whether every replica that must confirm did so within the lease."""
        return bool(self.term) and not self.silent(now, self._lease_s)

    def silent(self, now: float, for_s: float) -> set[int]:
        """Return the replicas that must confirm and did not for `for_s`."""
        return {one for one in self._needed() if not self.has_confirmed(one, now - for_s)}

    def has_confirmed(self, replica: int, since_s: float) -> bool:
        """Return whether a replica has confirmed something since then."""
        return self._confirmed_s(replica) >= since_s

    def _confirmed_s(self, replica: int) -> float:
        return self._confirmed[replica][1] if replica in self._confirmed else float("-inf")

    def followers(self, since_s: float) -> set[int]:
        """Return the hubs that have confirmed something since then."""
        return {one for one in self._confirmed if self.has_confirmed(one, since_s)}

    def step_down(self) -> None:
        """Lead no more: another hub leads under a higher term."""
        self.term, self._votes, self._agreement, self.only_sends = 0, None, None, False

    def resign(self, now: float) -> None:
        """Lead no more, and do not stand for a while: another one may be able to write its journal.

        Those that have just given this hub their votes may stand earlier than it does.
        """
        self.step_down()
        self._yielded_s = now + self._promise_s

    def yield_to(self, replica: int, until_s: float) -> bool:
        """Give this leader's vote to a replica in sync that asks for it until then; return whether it may.

        That is all there is to a hand-over: the successor is elected as any other, by a quorum.
        """
        newest = self.configs[-1] if self.configs else None
        if not self.term or newest is None or self._agreement is not None:
            return False
        if replica == self.voter.me or replica not in newest.replicas:
            return False
        self._successor, self._yields_until_s = replica, until_s
        return True

    def yields_to(self, replica: int, now: float) -> bool:
        """Return whether this leader wants that replica to lead in its place."""
        return bool(self.term) and replica == self._successor and now < self._yields_until_s

    def confirm(self, replica: int, position: Position, now: float) -> None:
        """Note that everything before `position` is on that replica's disk."""
        self._confirmed[replica] = position, now

    def confirmed(self, replica: int) -> Position:
        """Return the position that a replica has confirmed."""
        return self._confirmed.get(replica, ((0, 0), 0.0))[0]

    def acknowledged(self) -> Position:
        """Return the position before which everything may be acknowledged; (0, 0) without agreement."""
        if not self.term or self.configs[0].term != self.term or self.only_sends:
            return (0, 0)
        return min((self.confirmed(one) for one in self._needed()), default=END)

    def _enough(self, wanted: set[int], replicas: Iterable[int]) -> set[int]:
        """Return what is wanted, with those of the replicas up to `least` that confirmed last."""
        others = sorted(set(replicas) - wanted, key=lambda one: -self._confirmed_s(one))
        return wanted | set(others[: max(0, self.least - len(wanted))])

    def propose(self, replicas: Iterable[int], electors: Iterable[int]) -> Decided:
        """Ask for another configuration; return the records to write, [] if nothing is to change.

        While the voters have not agreed on the last one, replicas are only taken out, or replaced.

        Args:
            replicas: Hubs that should confirm records from now on.
            electors: Nodes that should break ties.
        """
        newest = self.configs[-1]
        wanted, chosen = {self.voter.me, *replicas}, tuple(sorted(electors)) or newest.electors
        if self._agreement is not None:
            kept, chosen = wanted & set(newest.replicas), newest.electors
            wanted = kept if len(kept) >= min(self.least, len(wanted)) else wanted
        ordered = self._decidable(self._enough(wanted, newest.replicas), chosen)
        if not self.term or (ordered, chosen) == (newest.replicas, newest.electors):
            return []
        after = Configured(self.term, newest.number + 1, self.voter.me, ordered, chosen)
        self.configs, self._former = (*self.configs, after), self._former.union(newest.replicas)
        return [after, *self._ask_for_agreement()]

    def placed(self, position: Position) -> None:
        """Note that the journal has the newest configuration on disk, before `position`, and accept it.

        Not earlier: a hub that has accepted what it could not write down would support no one without it.
        """
        self._placed = position
        if self.term:
            newest = self.configs[-1]
            self.voter, _ = self.voter.answer(self._proposal(newest), newest.term)

    @property
    def asks(self) -> Proposal | None:
        """Return the proposal that the voters should answer now; None if there is none.

        A configuration is proposed once all its replicas have it in their journals: each of them can then
        become the leader as soon as the voters have agreed.
        """
        if self._votes is not None:
            return self._votes.proposal
        if self._agreement is None:
            return None
        others = [one for one in self.configs[-1].replicas if one != self.voter.me]
        ready = all(self.confirmed(one) >= self._placed for one in others) and self._placed != END
        return self._agreement.proposal if ready else None

    def count_acceptance(self, answer: VoteReply, now: float) -> Decided:
        """Count an answer about a configuration; return the records to write."""
        if not self._is_answered_by(answer):
            return []
        tally = self._agreement
        if tally is None:
            return []
        if not tally.count(answer, now):
            self._learn(answer, tally)
            if answer.ballot == tally.proposal.ballot and answer.term >= self.term:
                self._refusing |= {answer.voter}
        if not tally.is_carried(tally.voters()):
            # Voters that are not needed overtake no leader: one of them could do so again and again.
            self.is_overtaken = self.is_overtaken or tally.is_carried(tally.voters() | self._refusing)
            return []
        self.configs, self._agreement, self._votes = self.configs[-1:], None, None
        self.is_overtaken = False
        return [Agreed(*self.configs[-1].ballot)]

    def _needed(self) -> set[int]:
        return {one for config in self.configs for one in config.replicas} - {self.voter.me}

    def _ask_for_agreement(self) -> Decided:
        proposal = self._proposal(self.configs[-1])
        self._agreement, self._placed = VoteCount(proposal, self.configs), END
        self._votes, self.is_overtaken, self._refusing = None, False, frozenset()
        after, own = self.voter.answer(proposal, proposal.term)
        self.voter = replace(after, accepted=self.voter.accepted)  # until it is `placed`
        return self.count_acceptance(own, 0.0)

    def _proposal(self, config: Configured) -> Proposal:
        return Proposal(config.term, config.number, self.voter.me, config.ballot, process=self._process)

    def _is_answered_by(self, answer: VoteReply) -> bool:
        """Return whether an answer is to this hub, and of a voter of a configuration that counts."""
        is_voter = any(answer.voter in (*one.replicas, *one.electors) for one in self.configs)
        return is_voter and answer.proposer == self.voter.me

    def _learn(self, answer: VoteReply, asked: "VoteCount | None") -> None:
        """Take over the term for which a voter refuses what was asked, by a bounded step."""
        if asked is not None and answer.ballot == asked.proposal.ballot and not answer.granted:
            self._known_term = max(self._known_term, min(answer.term, asked.proposal.term + TERM_STEP))


def is_quorum(config: Configured, voters: Container[int]) -> bool:
    """Return whether `voters` contains a quorum of `config`.

    Each replica has weight 2. The electors together have weight 1, for the side that has more than half of
    them. A quorum has more than half of the total weight, so that the electors decide only between equal
    halves of the replicas. Two quorums share a replica, or both have more than half of the electors and share
    an elector.
    """
    replicas = sum(replica in voters for replica in config.replicas)
    electors = sum(elector in voters for elector in config.electors)
    weight = 2 * replicas + (2 * electors > len(config.electors))
    return 2 * weight > 2 * len(config.replicas) + 1


@dataclass(slots=True)
class VoteCount:
    """Answers to `proposal`, which must be granted by a quorum of each of `configs`."""

    proposal: Proposal
    configs: Sequence[Configured]
    """Configurations that need a quorum each: the newest one that was agreed on, and all after it."""
    began_s: float = 0.0
    _granted: dict[int, float] = field(default_factory=dict)
    """Time of the answer, by voter."""

    def copied(self) -> "VoteCount":
        """Return a copy."""
        return replace(self, _granted=dict(self._granted))

    def count(self, answer: VoteReply, now: float) -> bool:
        """Note an answer; return False if it belongs to another proposal or does not grant this one."""
        ours = (answer.proposer, answer.ballot) == (self.proposal.proposer, self.proposal.ballot)
        ours = ours and answer.process in (0, self.proposal.process)  # 0: older voters do not know it
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


def placed_replicas(
    kept: Set[int], near: Set[int], me: int, place: Callable[[int], int], copies: int
) -> set[int]:
    """Return the replicas for the next configuration: those of the best places, one surplus at a time.

    Only the owner gives replicas up, one by one, each by an agreement of all voters. A peer that deleted its
    replica while a configuration still counted on it would take a vote away from the others for good.

    Args:
        kept: Replicas of the newest configuration that answer.
        near: Replicas that have nearly all of the owner's journal.
        me: The owner. It stays, and hands the part over if another replica should own it.
        place: Returns the place of a replica in the ranking of the part; a lower one is better.
        copies: Replicas that are wanted.
    """

    def order(one: int) -> tuple[int, int]:
        return place(one), one

    best = set(sorted(kept | near, key=order)[:copies])
    if len(kept) > copies:
        surplus = kept - best - {me}
        return set(kept) - {max(surplus, key=order)} if surplus else set(kept)
    newcomers = sorted((near - kept) & best, key=order)
    return set(kept).union(newcomers[: copies + 1 - len(kept)])
