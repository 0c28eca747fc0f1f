"""The leadership of a hub process: its state machine, with a clock, votes on disk, records in the journal."""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from aedit.async_sgd.journal import Ledger, NoSpace, Position, Unconfirmed
from aedit.async_sgd.replication import Replica, placed_replicas
from aedit.async_sgd.rules import Configured, Record
from aedit.proto.rpc import Extent, Proposal, Voter, VoteReply, offer_out
from aedit.proto.rpc import hub_pb2 as pb
from aedit.system import is_full

SILENT_S = 2.0
"""Timeout after which a silent standby is no longer waited for, if the voters agree."""
LEASE_S, _PROMISE_S = 2.0, 4.0
NEAR_BYTES = 8 * 2**20
"""A standby that lags no further than this is to be waited for."""
_TWIN_S = 4.0
"""Time for which a replica that has confirmed from one address is not taken for one at another address."""
_WAIT_LIMIT_S = 10.0
_YIELD_S, _YIELD_EVERY_S = 3.0, 10.0
"""How long a leader gives way to its successor, and after how long it tries again."""
_SETTLED_S = 10.0
"""How long a replica must have been in sync, under one leader, before the part goes to it by its place: each
change of owners costs an election, and a machine that has just come back may be about to go again."""
_PROCESS_BITS = 63
MOST_ELECTORS = 7
"""Nodes that break ties: few, so that the configuration seldom changes in a large run."""


class Leadership:
    """Leadership of one hub process. Any thread may call."""

    def __init__(
        self,
        file: Path | None,
        num_others: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        least: Callable[[], int] = lambda: 1,
        place: Callable[[str | None], int] | None = None,
    ) -> None:
        """Load the votes.

        Args:
            file: File of the votes; None keeps them in memory.
            num_others: Most hubs besides this one that may lead at a time.
            clock: Monotonic clock, in seconds.
            least: Returns how many replicas, this hub included, must have a record before it is acknowledged.
            place: In a swarm, returns the place of the replica at an address in the ranking of the part, and
                of this hub for None; `num_others` is then the number of replicas that are kept for long.
        """
        self._file, self._num_others, self._clock, self._least = file, num_others, clock, least
        self._place = place
        self._change = threading.Condition(threading.RLock())
        voter = Voter.load(file)
        self.key = voter.signing_key
        """Key with which this hub signs what it asks, answers and confirms."""
        process = secrets.randbits(_PROCESS_BITS) | 1
        self._replica = Replica(voter, promise_s=_PROMISE_S, lease_s=LEASE_S, process=process)
        self._ledger: Ledger | None = None
        self._writing = threading.Lock()
        self._owed: list[Record] = []
        """Decided, and not yet in the journal."""
        self._unplaced: Position | None = None
        """End of the newest configuration, which is in the journal and not yet accepted on disk."""
        self._standing_until_s = self._yield_again_s = float("-inf")
        self._addresses: dict[int, str] = {}
        """HOST:PORT of the replicas of a swarm that have confirmed something, by identity."""
        self.twins: dict[int, tuple[str, str]] = {}
        """Addresses of two processes that confirm as one replica, by its identity."""
        self._since_s: dict[int, float] = {}
        """Time since when each replica has been in the newest configuration of this leader."""
        self._ahead: Extent = (0, 0, 0)
        self._ahead_until_s = float("-inf")
        """What another hub has said to have, and until when it is believed."""
        if num_others and file is not None and not file.exists():
            self._save(self._replica.voter)

    @contextmanager
    def _deciding(self) -> Iterator[Replica]:
        """Yield a copy of the state machine; it counts once what it has promised is on disk.

        Raises NoSpace, and nothing is decided.
        """
        with self._change:
            after = self._replica.copied()
            after.least = self._least()
            yield after
            if after.voter != self._replica.voter:
                self._save(after.voter)
            self._replica = after
            self._change.notify_all()

    def _save(self, voter: Voter) -> None:
        try:
            voter.save(self._file)
        except OSError as error:
            if not is_full(error):
                raise
            raise NoSpace(f"{self._file}: no space ({error.strerror})") from error

    @property
    def identity(self) -> int:
        """Return the number under which this hub votes."""
        return self._replica.voter.me

    @property
    def promised(self) -> int:
        """Return the highest term that this hub has promised to support."""
        return self._replica.voter.term

    @property
    def seen(self) -> Extent:
        """Return the newest extent that this hub knows to be acknowledged, or has confirmed and set aside."""
        return self._replica.voter.seen

    @property
    def promise(self) -> pb.Answer:
        """Return the highest term that this hub has promised to support, signed."""
        return offer_out(self.key, self.promised)

    @property
    def has_others(self) -> bool:
        """Return whether another hub may lead instead."""
        return self._num_others > 0 or bool(self._replica.configs)

    @property
    def leads(self) -> bool:
        """Return whether this hub leads, as far as it knows. A hub without others always does."""
        return self._replica.term > 0 or not self.has_others

    # --- beginning

    def begin(
        self, extent: Extent, configs: tuple[Configured, ...], *, is_new: bool
    ) -> Sequence[Record] | None:
        """Return the records with which this hub begins to lead; None if it must follow or be elected.

        Args:
            extent: Of the journal.
            configs: Of the journal.
            is_new: No other hub can have a record of the run, or may have taken part in it.
        """
        with self._deciding() as replica:
            replica.configs = configs
            if not self.has_others:
                return []
            if is_new and not configs:
                return replica.found(extent[0])
            if configs and configs[-1].leader == self.identity and self._place is None:
                replica.note_leader(self._clock())  # else it might vote for one that votes for it
                replica.drop_leader()
            return replica.begin_alone(extent, self._clock()) or None

    def send(self, journal_term: int, configs: tuple[Configured, ...], answered: Set[int]) -> bool:
        """Lead the old term on without room on the disk, only to send the journal; return whether it does.

        answered: See `Replica.send`.
        """
        with self._deciding() as replica:
            replica.configs = configs
            if configs and configs[-1].leader == self.identity and not self.has_room():
                replica.send(journal_term, answered)
            return replica.only_sends

    def has_room(self) -> bool:
        """Return whether a promise could be written now."""
        with self._change, suppress(NoSpace):
            self._save(self._replica.voter)
            return True
        return False

    @property
    def only_sends(self) -> bool:
        """Return whether this hub leads only to send its journal: its disk was full when it started."""
        return self._replica.only_sends

    def needs_nodes(self, hubs: Set[int]) -> bool:
        """Return whether the votes of these hubs do not suffice to elect this one."""
        with self._change:
            return not self._replica.is_elected_by({self.identity, *hubs})

    def force(self, journal_term: int, jump: int) -> Sequence[Record]:
        """Return the records with which this hub leads without a vote."""
        with self._deciding() as replica:
            return replica.force(journal_term, jump)

    def attach(self, ledger: Ledger, position: Position) -> None:
        """Write further decisions to this journal, which has the first ones on disk before `position`."""
        with self._change:
            self._ledger, ledger.confirmed, ledger.is_confirmed = ledger, self.wait, self.acknowledges
            self._unplaced = position
        with suppress(NoSpace):  # this hub leads: `tick` tries again
            self._accept_newest()

    # --- votes

    def answer(self, proposal: Proposal, extent: Extent = (0, 0, 0)) -> VoteReply:
        """Return the answer to another hub that asks for a vote. Raises NoSpace: there is none then.

        extent: of the journal of a follower.
        """
        with self._deciding() as replica:
            return replica.answer(proposal, self._clock(), extent)

    def asks(self) -> Proposal | None:
        """Return what this hub asks of its voters now, as a leader or as a candidate."""
        with self._change:
            standing = self._replica.term > 0 or self._clock() < self._standing_until_s
            return self._replica.asks if standing else None

    def asks_elector(self, voter: int) -> bool:
        """Return whether this hub waits for the answer of a node that breaks ties."""
        with self._change:
            return self.asks() is not None and any(voter in one.electors for one in self._replica.configs)

    def count(self, answer: VoteReply, window_s: float = float("inf")) -> Sequence[Record]:
        """Count an answer; return the records with which this hub begins to lead, once it is elected.

        Raises NoSpace or JournalBroken.
        """
        with self._change:
            with self._deciding() as replica:
                now, leads = self._clock(), replica.term > 0
                if answer.ballot[1]:
                    decided = replica.count_acceptance(answer, now) if leads else []
                else:
                    decided = replica.count_vote(answer, now, now - window_s)
            if not leads:
                return decided
            self._owed += decided
        self._write()
        return []

    def resign(self, configs: tuple[Configured, ...]) -> None:
        """Lead no more, as the journal cannot be written; another hub may be elected first.

        configs: of the journal.
        """
        with self._deciding() as replica:
            replica.resign(self._clock())
            replica.configs = configs
            self._owed, self._unplaced, self._standing_until_s = [], None, float("-inf")

    # --- following

    def note_leader(self, configs: tuple[Configured, ...]) -> None:
        """Note a message from the leader, whose journal has these configurations."""
        with self._change:
            if not self._replica.term:
                self._replica.configs = configs
            self._replica.note_leader(self._clock())

    def drop_leader(self) -> None:
        """Note that the leader cannot be followed any more: this hub may stand for election at once."""
        with self._change:
            self._replica.drop_leader()

    def leader_ended(self) -> None:
        """Note that the leader says itself that it leads no more: this hub may vote for another at once."""
        with self._change:
            self._replica.leader_ended()

    def withdraw(self) -> None:
        """Ask for no votes any more: another hub leads, and this one follows it."""
        with self._change:
            if not self._replica.term:
                self._standing_until_s = float("-inf")
                self._replica.withdraw()

    def may_confirm(self, term: int) -> bool:
        """Return whether the journal of the leader of `term` may be confirmed to it."""
        with self._change:
            return self._replica.may_confirm(term)

    def forget(self, confirmed: Extent) -> None:
        """Note that the followed journal is fetched anew: this hub is no candidate before `confirmed`.

        Raises NoSpace.
        """
        with self._deciding() as replica:
            replica.forget(confirmed)

    def note_ahead(self, extent: Extent, for_s: float = float("inf")) -> None:
        """Note that another hub says it has this of the journal: this one does not stand before it has, too.

        for_s: how long that is believed.
        """
        with self._change:
            self._ahead, self._ahead_until_s = extent, self._clock() + for_s

    def stand(
        self,
        configs: tuple[Configured, ...],
        extent: Extent,
        window_s: float | None,
        *,
        invited: bool = False,
    ) -> str:
        """Ask for votes for the next `window_s`; return why not, "" if this hub can be elected.

        Args:
            configs: Of the journal.
            extent: Of the journal.
            window_s: How long a vote counts. None: it asks no longer than it does already.
            invited: The leader wants this hub to lead in its place.
        """
        with self._change:
            replica, now = self._replica, self._clock()
            if replica.term:
                return ""
            replica.configs = configs
            reason = replica.why_not(extent)
            if extent < self._ahead and now < self._ahead_until_s:
                reason = reason or f"its journal ends at {extent}, and another hub has it up to {self._ahead}"
            if not reason and (invited or replica.may_stand(now)):
                replica.stand(extent, now)
                if window_s is not None:
                    self._standing_until_s = now + window_s
            return reason

    # --- leading

    def twin_of(self, replica: int, address: str) -> str:
        """Return the address of the process that is this replica already; "" if the one at `address` may be.

        Two processes that were started from copies of one folder have one identity. To count both would be to
        count records, and votes, that only one of them has.
        """
        with self._change:
            other = self._addresses.get(replica, "")
            if replica != self.identity:
                recent = self._replica.has_confirmed(replica, self._clock() - _TWIN_S)
                if not (recent and other and address and other != address):
                    return ""
            self.twins[replica] = other or "this hub", address
            return other or "this hub"

    def is_of_another(self, replica: int, address: str) -> bool:
        """Return whether another replica of a swarm confirms from this address."""
        with self._change:
            since_s = self._clock() - _TWIN_S
            others = (one for one, place in self._addresses.items() if place == address and one != replica)
            is_taken = any(self._replica.has_confirmed(one, since_s) for one in others)
            return self._place is not None and bool(address) and is_taken

    def confirm(self, replica: int, position: Position, address: str = "") -> bool:
        """Note that everything before `position` is on the disk of a standby.

        Returns whether this hub wants it to lead: it asks for votes then. address: its HOST:PORT in a swarm.
        """
        with self._change:
            now = self._clock()
            self._replica.confirm(replica, position, now)
            self._addresses[replica] = address
            if replica in self.twins and self.twins[replica][1] == address:
                del self.twins[replica]  # the other one has ended
            self._change.notify_all()
            return self._replica.yields_to(replica, now)

    def hand_over(self, address: str = "") -> bool:
        """Let the replica at `address`, or any, be elected in place of this hub; return whether one may be.

        It must be in sync, and the one at `address` for some time. A later call has no effect for
        `_YIELD_EVERY_S`, so that a successor that fails costs little.
        """
        with self._change:
            now, replica = self._clock(), self._replica
            newest = replica.configs[-1].replicas if replica.configs else ()
            for one in newest:
                is_meant = one != self.identity and address in ("", self._addresses.get(one))
                if address and now - self._since_s.get(one, float("-inf")) < _SETTLED_S:
                    continue
                if is_meant and replica.has_confirmed(one, now - SILENT_S) and now >= self._yield_again_s:
                    self._yield_again_s = now + _YIELD_EVERY_S
                    return replica.yield_to(one, now + _YIELD_S)
            return False

    def wait(self, position: Position, limit_s: float = _WAIT_LIMIT_S) -> None:
        """Return when every replica has what is before `position`, and enough of them. Raises Unconfirmed."""
        deadline_s = self._clock() + limit_s
        with self._change:
            while not self.acknowledges(position):
                left_s = deadline_s - self._clock()
                if left_s <= 0 or not self._replica.term:
                    raise Unconfirmed("another hub of the run must confirm this first: try again")
                self._change.wait(min(left_s, 0.25))

    def acknowledges(self, position: Position) -> bool:
        """Return whether the replicas that were agreed on have it, and are as many as must be there.

        Before a node has joined there are no electors, without whom there may be no second replica.
        """
        with self._change:
            if not self.has_others or not self._replica.term:
                return not self.has_others
            agreed = self._replica.configs[0]
            enough = len(agreed.replicas) >= self._least() or not agreed.electors
            return enough and position <= self._replica.acknowledged()

    def tick(self, live: Iterable[int], complete: Position, extent: Extent, *, is_full: bool = False) -> None:
        """Propose another configuration if replicas or nodes have come or gone.

        Raises NoSpace or JournalBroken.

        Args:
            live: Votes of the live nodes, by which they are known.
            complete: End of the journal.
            extent: Of the journal.
            is_full: The disk has no room for pushes. Small records may have: a configuration without the
                other hubs could be written then, and none of them be elected any more. Votes that it asked
                for would be lost to those that have room.
        """
        with self._change:
            decided: list[Record] = []
            with self._deciding() as replica:
                if not replica.term or replica.only_sends:
                    return
                now = self._clock()
                if replica.is_overtaken and replica.may_stand(now) and not is_full:
                    replica.stand(extent, now)
                if not self._owed and not is_full:
                    # Those that break ties do so on; then others, in the order given.
                    voters = list(dict.fromkeys(voter for voter in live if voter))
                    electors = replica.configs[-1].electors
                    voters.sort(key=lambda voter: voter not in electors)
                    wanted = self._wanted(replica, complete, now)
                    decided += replica.propose(wanted, voters[:MOST_ELECTORS])
                newest = replica.configs[-1].replicas
                self._since_s = {one: self._since_s.get(one, now) for one in newest}
            self._owed += decided
        self._write()

    def note_promise(self, promise: VoteReply) -> None:
        """Note the highest term that another hub has promised; see `Replica.note_promise`."""
        with self._change:
            self._replica.note_promise(promise.voter, promise.term, is_hub=self._place is None)

    def holds_lease(self) -> bool:
        """Return whether every standby that is waited for has confirmed lately; true without standbys."""
        with self._change:
            return not self.has_others or self._replica.holds_lease(self._clock())

    def has_successor(self, complete: Position) -> bool:
        """Return whether this hub leads, and another can be elected, as far as it knows.

        That is a standby in sync which has confirmed lately; or voters that it needs support another hub,
        and it must be elected again itself. A leader that cannot write may not see the agreement on its
        newest configuration. The standby must be in every configuration that counts.

        complete: End of the journal. The standby must have all before it: what only a hub has that cannot
            lead would keep the others from leading.
        """
        with self._change:
            replica, since_s = self._replica, self._clock() - SILENT_S
            if not replica.term or not replica.configs:
                return False
            in_all = set(replica.configs[0].replicas).intersection(*(one.replicas for one in replica.configs))
            recent = [one for one in in_all - {self.identity} if replica.has_confirmed(one, since_s)]
            has_all = any(replica.confirmed(one) >= complete for one in recent)
            return has_all or replica.is_overtaken

    def in_sync(self) -> tuple[int, int]:
        """Return how many standbys the voters agreed to wait for, and how many nodes break ties."""
        with self._change:
            configs = self._replica.configs
            if not (configs and self._replica.term):
                return 0, 0
            return len(configs[0].replicas) - 1, len(configs[0].electors)

    def _wanted(self, replica: Replica, complete: Position, now: float) -> set[int]:
        old, recent = set(replica.configs[-1].replicas), replica.followers(now - SILENT_S)
        ends = {one: replica.confirmed(one) for one in recent}
        segment, end = complete
        near = {one for one, at in ends.items() if at[0] == segment and end - at[1] <= NEAR_BYTES}
        kept = old - replica.silent(now, SILENT_S)
        if (place := self._place) is None or not replica.is_agreed:
            return kept | set(sorted(near - old)[: max(0, self._num_others + 1 - len(kept))])
        me = self.identity
        places = {one: place(None if one == me else self._addresses.get(one, "")) for one in kept | near}
        return placed_replicas(kept, near - old, me, places.__getitem__, self._num_others)

    def _write(self) -> None:
        """Write what was decided to the journal, and then let it be proposed."""
        ledger = self._ledger
        with self._writing:
            with self._change:
                owed = list(self._owed)
            if owed and ledger is not None:
                with ledger.lock:
                    position = ledger.commit(owed)
                ledger.journal.sync(position)
                with self._change:
                    del self._owed[: len(owed)]
                    configs = [record for record in owed if isinstance(record, Configured)]
                    if configs and configs[-1] == self._replica.configs[-1]:
                        self._unplaced = position
            self._accept_newest()

    def _accept_newest(self) -> None:
        """Accept the newest configuration, which the journal has, and let it be proposed. Raises NoSpace."""
        with self._change:
            if self._unplaced is not None:
                with self._deciding() as replica:
                    replica.placed(self._unplaced)
                self._unplaced = None


def twin_text(here: str, other: str) -> str:
    """Return the text for two processes, at these addresses, that vote as one replica."""
    return (
        f"{here} and {other} are one replica: they were started from copies of one folder."
        " End the one that has less of the journal, delete votes.json in its folder, and start it again"
    )
