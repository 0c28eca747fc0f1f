"""Account for every position of a run's stream: verdicts, sums and bias, from records and the hub's journal.

A position is drawn by one node, trained by an inner step, and counts when that step is in a push that was
accepted, or in a round that has landed. `accounts_of` follows the steps of each node from push to push and
compares each push with the hub's journal, in which it has the number that the node has recorded. It trusts
neither side: what differs is listed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import erfc, inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from aedit.launch.records.positions import MOST_POSITIONS, Attempt, Event, GroupRecord, Trained
from aedit.types import UserError

MOST_NAMED = 4
"""Disagreements of one kind that are listed."""


class SampleVerdict(IntEnum):
    """Number of pushes that count and have a position."""

    NEVER = 0
    ONCE = 1
    TWICE = 2
    """Or more often."""
    NOT_COUNTED = 3
    """Trained, and no push with it was accepted."""
    ELSEWHERE = 4
    """Used, by the journal, by a node whose records are not in this run directory."""

    @property
    def text(self) -> str:
        """Return the verdict in words."""
        return ("never", "trained once", "trained twice", "not counted", "elsewhere")[self]


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions that the hub has leased to a node, as far as the journal goes back."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """Facts of the journals about positions and pushes; hubs that split the units are added up."""

    watermark: int
    """First position that was never leased."""
    unused: tuple[tuple[int, int], ...]
    """Positions below it that were given back, or are leased and not used."""
    leases: tuple[Lease, ...]
    is_whole: bool
    """Whether the journal is there from its beginning, so that `leases` and `verdicts` are complete."""
    names: Mapping[int, str]
    steps: Mapping[int, int]
    """Steps that accepted pushes count as by node, summed over the units of the model. A hub lowers a claim
    of more than the time since the last push allows."""
    pushes: Mapping[tuple[int, int], Mapping[int, int]]
    """Steps that an accepted push counts as, by node and unit and then by number, as far as the journal goes
    back."""
    since: Mapping[tuple[int, int], int]
    """Number of the newest push before the journal begins, by node and unit; 0 if it is not named."""
    renumbered: Collection[int]
    """Nodes whose pushes the hub has counted from 1 again: it had forgotten the node, or the part of a swarm
    was lost, and founded again with another journal."""
    numbers: Mapping[tuple[int, int], int]
    """Number of the newest decided push by node and unit."""
    refusals: Mapping[tuple[int, int, int], bool]
    """Whether its steps were dropped, of refused pushes by node, unit and number, as far as is known."""


@dataclass(frozen=True, slots=True)
class Fate:
    """End of the steps of one unit."""

    counts: bool
    round: int = 0
    at_step: float = 0
    reason: str = ""


@dataclass(slots=True)
class StepRange:
    """Steps `first` to `last` of an attempt between two rounds."""

    attempt: Attempt
    first: int
    last: float
    fates: dict[int, Fate] = field(default_factory=dict)
    """By unit."""

    @property
    def mask(self) -> int:
        """Return the units in which these steps count, as bits."""
        return sum(1 << unit for unit, fate in self.fates.items() if fate.counts)


@dataclass(frozen=True, slots=True)
class TrainedPiece:
    """Positions of one record, with the end of their steps."""

    attempt: Attempt
    trained: Trained
    segment: StepRange

    @property
    def round(self) -> int:
        """Return the round whose push has these steps; 0 without one."""
        return max((fate.round for fate in self.segment.fates.values()), default=0)

    @property
    def reason(self) -> str:
        """Return why the steps do not count in some unit; "" if they count in all."""
        units = self.attempt.units
        left = [self.segment.fates[u].reason for u in units if u in self.segment.fates]
        left = [reason for reason in left if reason]
        if not left:
            return "" if self.segment.fates else "its step is in no round yet"
        counted = len(units) - len(left)
        return left[0] if not counted else f"{left[0]}, in {len(left)} of {len(units)} units"


@dataclass(frozen=True, slots=True)
class Bias:
    """Comparison of trained groups with all that were drawn and rewarded."""

    what: str
    """`length` or `reward`."""
    drawn: float
    """Mean over drawn groups of the group's mean."""
    trained: float
    num_drawn: int
    num_trained: int
    z: float
    """Difference over its standard error for a random choice; NaN if all were trained."""

    @property
    def p(self) -> float:
        """Return the probability of such a difference by chance."""
        return erfc(abs(self.z) / sqrt(2)) if self.z == self.z else nan


@dataclass(slots=True, kw_only=True)
class NodeTotals:
    """Positions of one node; a position that it has trained twice counts twice."""

    name: str = ""
    leased: int = 0
    """As far as the journal goes back."""
    drawn: int = 0
    generated: int = 0
    replaced: int = 0
    put_back: int = 0
    trained: int = 0
    accepted: int = 0
    dropped: int = 0
    """Trained, and in no accepted push."""


@dataclass(slots=True, kw_only=True)
class Accounts:
    """Result of `accounts_of`. Arrays have one element per position."""

    kind: str
    pieces: Sequence[TrainedPiece]
    groups: Sequence[GroupRecord]
    attempts: Sequence[Attempt]
    verdict: NDArray[np.int8]
    piece: NDArray[np.int32]
    """Index of the record that counts, or of the newest one; -1 if the position was not trained."""
    times: NDArray[np.int16]
    """How often it was trained, whether it counts or not."""
    drawn_by: NDArray[np.int32]
    """Node; -1 if no node has drawn it."""
    group: NDArray[np.int32]
    """Index of its newest rewarded group; -1 without one."""
    put_back: NDArray[np.int16]
    """How often it went back to the stream by the records of its node."""
    leased_to: NDArray[np.int32]
    """Newest node by the journal; -1 without a lease, or if the journal does not go back so far."""
    leased: NDArray[np.int16]
    """Leases in the journal."""
    used: NDArray[np.bool_] | None
    """Whether the journal has it as used; None without a journal."""
    nodes: Mapping[int, NodeTotals]
    bias: Sequence[Bias]
    unreported: int
    """Positions in accepted pushes that the hub leases again, as their node has ended before its report."""
    disagreements: Sequence[str]
    """What differs between records and journal, or is missing; empty if all agrees."""

    def count(self, verdict: SampleVerdict) -> int:
        """Return the number of positions with this verdict."""
        return int((self.verdict == verdict).sum())

    def summary(self) -> str:
        """Return verdicts and agreement in one line."""
        drawn = (self.drawn_by >= 0) | (self.verdict != SampleVerdict.NEVER)
        counts = Counter(map(int, self.verdict[drawn]))
        parts = [f"{counts[verdict]:,} {verdict.text}" for verdict in SampleVerdict if counts[verdict]]
        text = f"{int(drawn.sum()):,} positions drawn: {', '.join(parts)}" if parts else "no position drawn"
        if self.disagreements:
            more = len(self.disagreements) - 1
            return f"{text}; DISAGREES: {self.disagreements[0]}" + (f" and {more} more" if more else "")
        agrees = "agrees with the hub's journal" if self.used is not None else "no record is missing"
        return f"{text}; {agrees}"

    def reason(self, position: int) -> str:
        """Return why a position has its verdict; "" for one that was trained once in all units."""
        verdict = SampleVerdict(int(self.verdict[position]))
        if verdict == SampleVerdict.ELSEWHERE:
            return "the node that has used it has no records here"
        if (at := int(self.piece[position])) >= 0:
            reason = self.pieces[at].reason
            if verdict == SampleVerdict.TWICE and not reason:
                return "trained again after it was in an accepted push"
            return reason
        if (at := int(self.group[position])) >= 0 and self.groups[at].replaced:
            return "replaced: all rewards are equal"
        if self.put_back[position]:
            return "went back to the stream"
        if self.drawn_by[position] >= 0:
            return "in no batch yet" if self.group[position] >= 0 else "not generated to its end"
        if self.used is not None and self.used[position]:
            return "used by the journal, and in no record"
        return "leased and not drawn" if self.used is not None else "skipped at a restart"


def accounts_of(nodes: Mapping[int, Sequence[Attempt]], journal: JournalFacts | None) -> Accounts:
    """Return the accounts of the nodes whose records are here.

    Args:
        nodes: Attempts by node, of `read_positions`.
        journal: Facts of the hub; None in a run without one, or if its folder is elsewhere.

    Raises UserError if the records are not of one run.
    """
    attempts = [attempt for each in nodes.values() for attempt in each]
    if len({attempt.kind for attempt in attempts}) > 1:
        raise UserError(
            "records of positions: some nodes train on text and others by reinforcement learning; "
            "the directory mixes two runs"
        )
    wrong: list[str] = []
    pieces: list[TrainedPiece] = []
    for node, each in nodes.items():
        follower = _Follower(node, each, journal, wrong)
        pieces += follower.pieces()
    wrong += _record_faults(attempts)
    size = max(
        (each.stop for attempt in attempts for each in _all_slices(attempt)),
        default=0,
    )
    size = max(size, journal.watermark if journal else 0)
    if size > MOST_POSITIONS:
        raise UserError(f"{size} positions, expected at most {MOST_POSITIONS}: use the records of one run")
    accounts = _added(attempts, pieces, size, journal, wrong)
    accounts.bias = tuple(_bias(accounts))
    return accounts


def _all_slices(attempt: Attempt) -> Iterator[slice]:
    for trained in attempt.trained:
        yield from trained.ranges
    for _, ranges in attempt.drawn:
        yield from ranges
    for group in attempt.groups:
        yield slice(group.position, group.position + 1)


# -- the steps of a node, from push to push


class _Follower:
    """Follows the steps of one node over its attempts; appends what does not fit to `wrong`."""

    def __init__(
        self, node: int, attempts: Sequence[Attempt], journal: JournalFacts | None, wrong: list[str]
    ) -> None:
        self._node, self._attempts, self._journal, self._wrong = node, attempts, journal, wrong
        self._segments: dict[int, list[StepRange]] = {}
        """By place of the attempt."""
        self._pending: dict[int, list[StepRange]] = {}
        """Steps by unit that are in no push under way."""
        self._open: dict[int, tuple[Event, dict[int, list[StepRange]]]] = {}
        """Rounds under way: their opening, and the steps in each push."""
        self._after: dict[tuple[int, int], int] = {}
        """Next round with the same unit, by round and unit."""
        self._outcomes: dict[tuple[int, int], Fate | None] = {}
        """Ends of rounds by round and unit; None for a refused push."""
        self._steps = 0
        """Most steps that the journal may have: of pushes that were accepted, or distrusted."""
        self._claims: dict[int, dict[int, tuple[int, bool]]] = {}
        """By unit, and by number at the hub: steps of a push, and whether it was accepted."""
        self._firsts: dict[int, int] = {}
        """First number of a push by unit."""
        self._newest: dict[int, int] = {}
        """Newest number in `_claims` by unit."""
        self._number_of: dict[tuple[int, int], int] = {}
        """Number of a push at the hub, by round and unit."""
        self._doubtful: dict[tuple[int, int], tuple[list[StepRange], Fate]] = {}
        """Steps and end of pushes of killed processes from before the journal begins, by unit and number."""

    def pieces(self) -> list[TrainedPiece]:
        """Return all trained positions with what became of them."""
        for place, attempt in enumerate(self._attempts):
            self._begin(place, attempt)
            for event in attempt.events:
                match event.kind:
                    case "open":
                        self._opened(place, attempt, event)
                    case "round":
                        self._ended(event)
            self._end(place, attempt)
        self._refuse_doubtful()
        self._compare()
        found = []
        for place, attempt in enumerate(self._attempts):
            for trained in attempt.trained:
                segment = next(
                    (each for each in self._segments[place] if each.first <= trained.last <= each.last),
                    None,
                )
                if segment is not None:
                    found.append(TrainedPiece(attempt, trained, segment))
        return found

    def _begin(self, place: int, attempt: Attempt) -> None:
        """Undo what a resume has undone, in a run without a hub; the rest of it is trained on from."""
        self._segments[place] = []
        for known in (self._open, self._after, self._outcomes, self._number_of):
            known.clear()
        if attempt.leases:
            self._pending = {unit: [] for unit in attempt.units}
            return
        pending: dict[int, list[StepRange]] = {unit: [] for unit in attempt.units}
        for earlier in range(place):
            kept: list[StepRange] = []
            for segment in self._segments[earlier]:
                if segment.first <= attempt.step < segment.last:
                    kept.append(_split(segment, attempt.step))
                kept.append(segment)
            self._segments[earlier] = kept
            for segment in kept:
                if segment.first > attempt.step:
                    segment.fates = {
                        unit: Fate(False, reason=f"undone: the node went back to step {attempt.step}")
                        for unit in attempt.units
                    }
                    continue
                for unit in attempt.units:
                    fate = segment.fates.get(unit)
                    if fate is None or fate.at_step > attempt.step:
                        segment.fates.pop(unit, None)
                        pending[unit].append(segment)
        self._pending = pending

    def _opened(self, place: int, attempt: Attempt, event: Event) -> None:
        segments = self._segments[place]
        first = max(attempt.step, int(segments[-1].last) if segments else attempt.step) + 1
        for segment in _segments(attempt, first, event.step):
            segments.append(segment)
            for unit in attempt.units:
                if unit not in segment.fates:
                    self._pending.setdefault(unit, []).append(segment)
        if event.id in self._open:
            self._wrong.append(f"node {self._node}: round {event.id} was opened twice")
        taken: dict[int, list[StepRange]] = {}
        for unit in set(event.units) & set(attempt.units):
            for other, (_, pushes) in self._open.items():
                if unit in pushes and (other, unit) not in self._after:
                    self._after[other, unit] = event.id
                    if not attempt.leases:  # with a hub each unit lands when its answer is there
                        text = f"the end of round {other} is not recorded, and round {event.id} follows"
                        self._wrong.append(f"node {self._node}: {text}")
            if number := event.numbers.get(unit):
                self._firsts[unit] = min(number, self._firsts.get(unit, number))
                self._number_of[event.id, unit] = number
                self._give_again(unit, number)
            due, self._pending[unit] = self._pending.get(unit, []), []
            if unit in event.dropped:
                self._settle(due, Fate(False, event.id, event.step, event.dropped[unit]), unit)
            else:
                taken[unit] = due
        self._open[event.id] = event, taken

    def _ended(self, event: Event) -> None:
        opening, pushes = self._open.pop(event.id, (None, {}))
        if opening is None:
            self._wrong.append(f"node {self._node}: round {event.id} has ended, and no start is recorded")
            return
        for unit, due in pushes.items():
            fate: Fate | None = None
            if unit in event.dropped:
                fate = Fate(False, event.id, event.step, event.dropped[unit])
            elif unit not in event.refused:
                fate = Fate(True, event.id, event.step)
            self._outcomes[event.id, unit] = fate
            self._decide(event.id, unit, due)

    def _decide(self, round_id: int, unit: int, due: list[StepRange]) -> None:
        """Settle the steps of a push as its round has ended; those of a refused one are in the next push."""
        fate = self._outcomes[round_id, unit]
        if fate is None:
            later = self._after.get((round_id, unit))
            if later is None:
                self._pending[unit] = due + self._pending[unit]
            elif later in self._open:
                pushes = self._open[later][1]
                pushes[unit] = due + pushes.get(unit, [])
            elif (later, unit) in self._outcomes:
                self._decide(later, unit, due)
        else:
            self._settle(due, fate, unit)
            self._claim(round_id, unit, due, fate.counts)

    def _give_again(self, unit: int, number: int) -> None:
        """Forget the pushes from this number on, as the hub has none of them.

        It has lost them, unless it has not believed them, or counts from 1 again.
        """
        journal = self._journal
        if number > self._newest.get(unit, 0):
            return
        claims, self._newest[unit] = self._claims[unit], number - 1
        again = [each for each in claims if each >= number]
        was_accepted = any(claims[each][1] for each in again)
        if was_accepted and journal is not None and self._node not in journal.renumbered:
            text = f"push {number} of unit {unit} was accepted by its records, and its number is given again"
            self._wrong.append(f"node {self._node}: {text}")
        for each in again:
            del claims[each]

    def _claim(self, round_id: int, unit: int, due: Sequence[StepRange], accepted: bool) -> None:
        """Add these steps, if any, to the push of a round, which the hub has taken, or may have."""
        steps = sum(map(_num_steps, due))
        self._steps += steps
        if steps and (number := self._number_of.get((round_id, unit))):
            claims = self._claims.setdefault(unit, {})
            self._newest[unit] = max(number, self._newest.get(unit, 0))
            claims[number] = claims.get(number, (0, False))[0] + steps, accepted

    def _end(self, place: int, attempt: Attempt) -> None:
        """Settle what the attempt has left: pushes without an answer, and steps that it has not pushed."""
        segments = self._segments[place]
        first = max(attempt.step, int(segments[-1].last) if segments else attempt.step) + 1
        tails = _segments(attempt, first, inf)
        segments += tails
        tail = tails[-1]
        if tail.fates:
            return
        if not attempt.leases:
            sent = [each for _, pushes in self._open.values() for each in pushes.items()]
            self._open.clear()
            if place == len(self._attempts) - 1:  # else the next attempt trains on from it, or has undone it
                fate = Fate(False, reason="its round has not landed")
                for unit, each in (*sent, *self._pending.items(), *((u, [tail]) for u in attempt.units)):
                    self._settle(each, fate, unit)
            return
        for number, (opening, pushes) in sorted(self._open.items()):
            if attempt.ended:
                self._wrong.append(f"node {self._node}: the end of round {number} is not recorded")
            for unit, due in pushes.items():
                if due:
                    fate, is_there = self._without_answer(place, unit, opening)
                    self._settle(due, fate, unit)
                    if is_there:
                        self._claim(number, unit, due, fate.counts)
                        since = self._journal.since.get((self._node, unit), 0) if self._journal else 0
                        if fate.counts and opening.numbers[unit] <= since:
                            self._doubtful[unit, opening.numbers[unit]] = due, fate
        for unit in attempt.units:
            why = "left without a push" if attempt.ended else "its node ended before a push"
            self._settle([*self._pending.get(unit, ()), tail], Fate(False, reason=why), unit)

    def _without_answer(self, place: int, unit: int, opening: Event) -> tuple[Fate, bool]:
        """Return the end of a push whose answer its node has not seen, and whether the hub may have it."""
        journal, number, own = self._journal, opening.numbers.get(unit), (opening.id, opening.step)
        if journal is None:
            return Fate(False, *own, "its node ended before an answer, and no journal is here"), False
        if number is None:  # by an earlier version
            return Fate(False, *own, "its node ended before an answer, and has not recorded its number"), True
        # The next attempt has recorded up to where the hub had the pushes of this one.
        later = (event for attempt in self._attempts[place + 1 :] for event in attempt.events)
        after = next((event.numbers[unit] for event in later if unit in event.numbers), inf)
        if number >= after or number > journal.numbers.get((self._node, unit), 0):
            return Fate(False, *own, "its push did not reach the hub"), False
        refusal = journal.refusals.get((self._node, unit, number))
        if refusal is None:
            return Fate(True, *own), True
        return Fate(False, *own, "its push was distrusted" if refusal else "its push was refused"), refusal

    def _refuse_doubtful(self) -> None:
        """Settle the doubtful pushes as refused if the hub has no more steps than those of all others."""
        journal, known = self._journal, 0
        if journal is None or self._node in journal.renumbered:
            return
        for unit, claims in self._claims.items():
            there = journal.pushes.get((self._node, unit), {})
            for number, (steps, accepted) in claims.items():
                if accepted and (unit, number) not in self._doubtful:
                    known += there.get(number, steps)
        if journal.steps.get(self._node, 0) <= known:
            for (unit, _), (due, fate) in self._doubtful.items():
                self._settle(due, Fate(False, fate.round, fate.at_step, "its push was refused"), unit)

    def _settle(self, segments: Sequence[StepRange], fate: Fate, unit: int) -> None:
        for segment in segments:
            segment.fates[unit] = fate

    def _compare(self) -> None:
        """Compare pushes and their steps with the journal's.

        A push may count as fewer steps than the node has made. A merge may drop one that was accepted.
        """
        journal = self._journal
        if journal is None or not self._attempts[-1].leases:
            return
        if self._node not in journal.steps:
            self._wrong.append(f"node {self._node}: it has records, and the journal does not know it")
            return
        if (found := journal.steps[self._node]) > self._steps:
            text = f"{found} steps in accepted pushes by the journal, over all units, and {self._steps}"
            self._wrong.append(f"node {self._node}: {text} by its records")
        differ = [text for unit in sorted(self._firsts) for text in self._different(journal, unit)]
        more = f", and {len(differ) - 1} more pushes" if len(differ) > 1 else ""
        self._wrong += [f"node {self._node}: {text}{more}" for text in differ[:1]]

    def _different(self, journal: JournalFacts, unit: int) -> Iterator[str]:
        """Yield what differs between the records of a unit's pushes and the journal, push for push."""
        claims, key = self._claims.get(unit, {}), (self._node, unit)
        there = journal.pushes.get(key, {})
        for number, steps in there.items():
            claimed = claims.get(number, (0, False))[0]
            if number >= self._firsts[unit] and steps > claimed:
                text = f"push {number} of unit {unit} has {steps} steps by the journal"
                yield f"{text}, and {claimed} by its records"
        for number, (steps, accepted) in claims.items():
            if accepted and number > journal.since.get(key, 0) and number not in there:
                text = f"push {number} of unit {unit}, of {steps} steps, was accepted by its records"
                yield f"{text}, and the journal lacks it"


def _segments(attempt: Attempt, first: int, last: float) -> list[StepRange]:
    """Return these steps, if any, as segments: those of the warm-up count as they are taken."""
    cut = min(attempt.warmup, last)
    parts = [StepRange(attempt, first, cut)] if first <= cut else []
    for warm in parts:
        warm.fates = dict.fromkeys(attempt.units, Fate(True))
    if cut == last:
        return parts
    begin = max(first, int(cut) + 1)
    return [*parts, StepRange(attempt, begin, last)] if begin <= last else parts


def _split(segment: StepRange, step: int) -> StepRange:
    """Cut a segment after a step: it keeps the later steps, and the earlier ones are returned."""
    early = StepRange(segment.attempt, segment.first, step, dict(segment.fates))
    segment.first = step + 1
    return early


def _num_steps(segment: StepRange) -> int:
    return int(segment.last) - segment.first + 1


def _record_faults(attempts: Iterable[Attempt]) -> list[str]:
    """Return what is missing from the records of trained steps, or there twice."""
    found = []
    for attempt in attempts:
        for rank in sorted({trained.rank for trained in attempt.trained}):
            where = f"node {attempt.node}, attempt {attempt.number}, rank {rank}"
            last = attempt.step
            for trained in (each for each in attempt.trained if each.rank == rank):
                if trained.first > last + 1:
                    found.append(f"{where}: steps {last + 1} to {trained.first - 1} are not recorded")
                elif trained.first <= last:
                    found.append(f"{where}: steps from {trained.first} are recorded twice")
                last = max(last, trained.last)
            ends = [event.step for event in attempt.events if event.kind in ("open", "stop")]
            if ends and max(ends) > last:
                found.append(f"{where}: steps {last + 1} to {max(ends)} are not recorded")
        if attempt.lost_lines:
            where = f"node {attempt.node}, attempt {attempt.number}"
            found.append(f"{where}: {attempt.lost_lines} records could not be written")
    return found


# -- the positions


def _added(
    attempts: Sequence[Attempt],
    pieces: Sequence[TrainedPiece],
    size: int,
    journal: JournalFacts | None,
    wrong: list[str],
) -> Accounts:
    piece, owner = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    times, counted = np.zeros(size, np.int16), np.zeros(size, np.int16)
    for number, each in enumerate(pieces):
        mask = each.segment.mask
        for part in each.trained.ranges:
            times[part] += 1
            if not mask:
                part_of = piece[part]
                part_of[owner[part] < 0] = number
                continue
            before = owner[part]
            again = np.zeros(len(before), bool)
            for other in np.unique(before[before >= 0]):
                if pieces[other].segment.mask & mask:
                    again |= before == other
            counted[part] += again | (before < 0)
            owner[part] = piece[part] = number
    drawn_by, put_back = np.full(size, -1, np.int32), np.zeros(size, np.int16)
    group = np.full(size, -1, np.int32)
    groups: list[GroupRecord] = []
    totals: dict[int, NodeTotals] = {}
    for attempt in attempts:
        mine = totals.setdefault(attempt.node, NodeTotals(name=attempt.name))
        for trained in attempt.trained:
            for part in trained.ranges:
                drawn_by[part] = attempt.node
        for _, ranges in attempt.drawn:
            for part in ranges:
                drawn_by[part] = attempt.node
        for returned in _put_back(attempt):
            put_back[returned] += 1
            mine.put_back += 1
        twice = set[int]()
        seen = set[int]()
        for record in attempt.groups:
            (twice if record.position in seen else seen).add(record.position)
            group[record.position] = len(groups)
            groups.append(record)
            mine.generated += 1
            mine.replaced += record.replaced
        if repeated := twice - set(_put_back(attempt)):
            text = f"{len(repeated)} groups are recorded twice, such as {min(repeated)}"
            wrong.append(f"node {attempt.node}: {text}")
        if attempt.kind == "rl":
            mine.drawn += sum(len(range(p.start, p.stop, p.step)) for _, each in attempt.drawn for p in each)
        else:
            mine.drawn += sum(_num_positions(trained) for trained in attempt.trained)
    for each in pieces:
        mine, num = totals[each.attempt.node], _num_positions(each.trained)
        mine.trained += num
        mine.accepted += num if each.segment.mask else 0
        mine.dropped += 0 if each.segment.mask else num
    verdict = np.where(times > 0, SampleVerdict.NOT_COUNTED, SampleVerdict.NEVER).astype(np.int8)
    verdict[counted == 1] = SampleVerdict.ONCE
    verdict[counted > 1] = SampleVerdict.TWICE
    used, unreported = None, 0
    leased_to, leased = np.full(size, -1, np.int32), np.zeros(size, np.int16)
    if journal is not None:
        used, unreported = _against_journal(
            journal, verdict, times, group, groups, leased_to, leased, totals, wrong
        )
    return Accounts(
        kind=attempts[0].kind,
        pieces=pieces,
        groups=groups,
        attempts=attempts,
        verdict=verdict,
        piece=piece,
        times=times,
        drawn_by=drawn_by,
        group=group,
        put_back=put_back,
        leased_to=leased_to,
        leased=leased,
        used=used,
        nodes=totals,
        bias=(),
        unreported=unreported,
        disagreements=wrong,
    )


def _against_journal(
    journal: JournalFacts,
    verdict: NDArray[np.int8],
    times: NDArray[np.int16],
    group: NDArray[np.int32],
    groups: Sequence[GroupRecord],
    leased_to: NDArray[np.int32],
    leased: NDArray[np.int16],
    totals: dict[int, NodeTotals],
    wrong: list[str],
) -> tuple[NDArray[np.bool_], int]:
    """Compare positions with the hub's leases; return which are used, and how many were not reported."""
    for lease in journal.leases:
        leased_to[lease.start : lease.end] = lease.node
        leased[lease.start : lease.end] += 1
        named = NodeTotals(name=journal.names.get(lease.node, ""))
        totals.setdefault(lease.node, named).leased += lease.end - lease.start
    used = np.zeros(len(verdict), np.bool_)
    used[: journal.watermark] = True
    for start, end in journal.unused:
        used[start:end] = False
    if beyond := int((times[journal.watermark :] > 0).sum()):
        wrong.append(
            f"{beyond} trained positions were never leased, such as {_first(times > 0, journal.watermark)}"
        )
    is_replaced = np.zeros(len(verdict), np.bool_)
    replaced = np.array([*(record.replaced for record in groups), False])
    is_replaced[:] = replaced[group]
    counts = (verdict == SampleVerdict.ONCE) | (verdict == SampleVerdict.TWICE)
    absent = set(journal.names) - {node for node, each in totals.items() if each.trained or each.drawn}
    missing = used & (times == 0) & ~is_replaced
    elsewhere = missing & (np.isin(leased_to, list(absent)) if journal.is_whole else bool(absent))
    verdict[elsewhere] = SampleVerdict.ELSEWHERE
    missing &= ~elsewhere
    if num := int(missing.sum()):
        wrong.append(f"{num} positions are used by the journal and in no record, such as {_first(missing)}")
    return used, int((counts & ~used).sum())


def _first(which: NDArray[np.bool_], after: int = 0) -> int:
    return after + int(np.flatnonzero(which[after:])[0])


def _put_back(attempt: Attempt) -> list[int]:
    """Return the positions that the node has drawn and put back, each as often as it was put back."""
    drawn: dict[int, int] = {}
    found: list[int] = []
    events = [event.place for event in attempt.events if event.kind == "put_back"]
    for place, ranges in attempt.drawn:
        numbers = [n for part in ranges for n in range(part.start, part.stop, part.step)]
        drawn |= dict(zip(range(place, place + len(numbers)), numbers, strict=True))
    for place in events:
        found += [position for at, position in drawn.items() if at >= place]
    return found


def _num_positions(trained: Trained) -> int:
    return sum(len(range(part.start, part.stop, part.step)) for part in trained.ranges)


def _bias(accounts: Accounts) -> Iterator[Bias]:
    """Yield the comparisons of trained groups with all rewarded ones, by length and by reward.

    Under a random choice of n of N groups without replacement the mean of the chosen ones has the variance
    s^2 / n * (1 - n / N), with s^2 the variance over all of them (Cochran, Sampling Techniques, 1977, 2.5).
    Groups are compared by their means, as rollouts of one prompt are alike.
    """
    newest = {record.position: record for record in accounts.groups}
    chosen = np.isin(accounts.verdict, (SampleVerdict.ONCE, SampleVerdict.TWICE))
    for what in ("length", "reward"):
        values, trained = [], []
        for position, record in newest.items():
            known = [
                float(each)
                for each in (record.lengths if what == "length" else record.rewards)
                if each is not None
            ]
            if known:
                values.append(sum(known) / len(known))
                trained.append(bool(chosen[position]))
        if values and any(trained):
            yield _compared(what, np.array(values), np.array(trained))


def _compared(what: str, values: NDArray[np.float64], trained: NDArray[np.bool_]) -> Bias:
    num, of = int(trained.sum()), len(values)
    mean, own = float(values.mean()), float(values[trained].mean())
    error = sqrt(float(values.var(ddof=1)) / num * (1 - num / of)) if 1 < of != num else 0.0
    return Bias(what, mean, own, of, num, (own - mean) / error if error else nan)
