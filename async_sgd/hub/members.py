"""Members of the run: what each was told last, and how many steps each should do."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aedit.async_sgd.rules import Joined, Push, Refused
from aedit.types import Verdict

_FORGIVEN_AFTER = 16
"""Accepted pushes that make one violation forgotten."""
NORM = "norm"
"""Kind of reason for what is too long to be believed: the part of a reason before its first colon."""


CERTIFIED = "certified"
"""Proof of a node whose name is that of its certificate or token."""


@dataclass(frozen=True, slots=True)
class Told:
    """The last decision about a node's pushes of one unit."""

    seq: int = 0
    verdict: Verdict = Verdict.NONE
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A node's report about itself. Not journaled.

    Lost when the hub restarts, and sent again with the next heartbeat.
    """

    steps: int = 0
    tokens: int = 0
    steps_per_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    wire_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float = math.nan
    state: str = "joining"
    rl: Mapping[str, float] = field(default_factory=dict)
    """Reinforcement learning, by names of `RL_REPORT`; empty in a run on text."""


_EARLIER = 8
"""Earlier sessions of a process that are known."""


@dataclass(slots=True)
class Member:
    """One node, from its first join on; it stays on the list when it leaves."""

    name: str
    node: int
    session: int = 0
    process: int = 0
    """Fingerprints of session and process of its newest join: other hubs can read the journal."""
    proof: str = ""
    origin: str = ""
    voter: int = 0
    """Identity under which it votes in a failover; 0: it does not vote."""
    donor: str = ""
    live: bool = False
    excluded: bool = False
    gone: str = ""
    """Why it left."""
    steps: int = 0
    """Inner steps in accepted pushes, summed over units."""
    tokens: int = 0
    leased: int = 0
    """Samples that it was ever given. Those that it lost as it was silent count: it may have used them."""
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refused pushes by kind of reason."""
    violations: int = 0
    offended: int = 0
    """Sequence number of the last violation: one bad round is one violation, however many units it has."""
    weight: float = 0.0
    """Share of its last push in its round."""
    staleness: int = 0
    received: dict[int, int] = field(default_factory=dict)
    """Sequence number of the last push that was accepted or refused, by unit."""
    told: dict[int, Told] = field(default_factory=dict)
    earlier: tuple[int, ...] = field(default=(), compare=False)
    """Sessions of this very process before its newest join, as far as this hub has seen them."""
    era: int = field(default=0, compare=False)
    """Number of snapshots begun before this object was made: it belongs to those that began later, too."""

    def copied(self, era: int) -> "Member":
        """Return a copy that changes apart from this one."""
        own = {"refused": dict(self.refused), "received": dict(self.received), "told": dict(self.told)}
        return replace(self, **own, era=era)  # type: ignore[arg-type]

    def join(self, record: Joined) -> None:
        """Take the record of a join: new session, process and donor address."""
        is_same = record.process != 0 and record.process == self.process
        self.earlier = (*self.earlier, self.session)[-_EARLIER:] if is_same else ()
        self.session, self.donor, self.live, self.gone = record.session, record.donor, True, ""
        self.process, self.proof, self.origin = record.process, record.proof, record.origin
        self.voter = record.voter

    def accept(self, push: Push, *, counts: bool = True) -> None:
        """Count an accepted push. Every 16 accepted pushes forgive one violation.

        counts: whether its steps are steps of the run.
        """
        self.received[push.unit] = push.seq
        if counts:
            self.steps += push.steps
            self.tokens += push.tokens
        self.accepted += 1
        if self.accepted % _FORGIVEN_AFTER == 0:
            self.violations = max(0, self.violations - 1)

    def refuse(self, record: Refused) -> None:
        """Note a refused push: what the node is told, its reason and its violation."""
        self.received[record.unit] = max(record.seq, self.received.get(record.unit, 0))
        verdict = Verdict.DISTRUSTED if record.distrusted else Verdict.REFUSED
        self.tell(record.unit, Told(record.seq, verdict, record.reason))
        self.count(record.reason)
        if record.violation:
            self.add_violation(record.seq)

    def count(self, reason: str) -> None:
        """Count one more push that was not merged, by reason, for `status`."""
        self.refused[kind(reason)] = self.refused.get(kind(reason), 0) + 1

    def add_violation(self, seq: int) -> None:
        """Count one violation per round, however many units it has."""
        if seq > self.offended:
            self.violations += 1
            self.offended = seq

    def is_refused(self, unit: int) -> bool:
        """Return whether its last push of the unit was refused: others need not wait for the next one."""
        last = self.told.get(unit, Told())
        return last.verdict in (Verdict.REFUSED, Verdict.DISTRUSTED) and last.seq == self.received.get(unit)

    def is_distrusted(self, unit: int) -> bool:
        """Return whether its last push of the unit was not believed."""
        last = self.told.get(unit, Told())
        return last.verdict == Verdict.DISTRUSTED and last.seq == self.received.get(unit)

    def tell(self, unit: int, told: Told) -> None:
        """Note the newest decision about this node's pushes of the unit."""
        if told.seq > self.told.get(unit, Told()).seq:
            self.told[unit] = told


def kind(reason: str) -> str:
    """Return the key under which a reason is counted."""
    return reason.split(":")[0]


def dylu(every: int, steps_per_s: float, fastest: float | None) -> int:
    """Return H_w = max(1, floor(H v_w / v_max)) (DyLU, arXiv:2401.09135): steps of a node before its push.

    steps_per_s: speed of the node. fastest: inner steps per second of the fastest node; None if no speed is
    known. A node that has not reported its speed does `every` steps.
    """
    if not steps_per_s or fastest is None:
        return every
    return max(1, min(every, math.floor(every * steps_per_s / fastest)))
