"""A hub in the caller's process: the real state machine and a `Link` to it, without sockets, files or agents.

    hub = InProcessHub(plan, layout)
    exchange = HubExchange(hub.link("alpha"))

Nodes may be threads. For tests, simulations and small studies; nothing survives the process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, RLock

import numpy as np

from aedit.async_sgd.hub import Hub, Joiner, NodeReport, Quantiser, run_news
from aedit.async_sgd.rules import (
    Accepted,
    ArrayValues,
    HubPlan,
    Leased,
    Merged,
    Push,
    Record,
    Refused,
    Vector,
)
from aedit.proto.agent import Answer, Leases, Progress
from aedit.types import Layout, News, UnitLayout, Verdict, checked

_SAMPLES = 1 << 40
"""Training samples of a corpus that the hub knows nothing of."""

Tamper = Callable[[Push], Push]


def make_push(values: Vector, layout: UnitLayout, **facts: int) -> Push:
    """Return a push of `values` (1-d fp32, one unit in canonical order), the norm of each tensor measured.

    facts: node, unit, seq, base, steps and tokens of the push.
    """
    ends = np.cumsum([tensor.numel for tensor in layout.tensors])
    with np.errstate(over="ignore", invalid="ignore"):
        norms = tuple(float(np.linalg.norm(part.astype(np.float64))) for part in np.split(values, ends[:-1]))
    return Push(values=ArrayValues(values), norms=norms, **facts)


@dataclass(slots=True)
class HubDecisions:
    """Decisions of the hub, by node."""

    accepted: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """(node, reason) of each push that was refused."""
    staleness: list[int] = field(default_factory=list)
    """Anchor versions between base and merge, of each part of a merge."""
    ignored: list[int] = field(default_factory=list)
    """Nodes whose push of a unit did not count in its merge."""


@checked()
class InProcessHub:
    """Runs a `Hub` and applies each record as soon as it is decided. Safe to call from several threads."""

    def __init__(
        self,
        plan: HubPlan,
        layout: Layout,
        *,
        quantiser: Quantiser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """plan: what the hub must know of the run. layout: units and tensors of the model.

        quantiser: the codec named by `hub.codec_down`, None for "fp32". clock: seconds; a `VirtualClock` for
        simulations.
        """
        self.hub, self.layout, self.clock = Hub(plan, quantiser), layout, clock
        self.tally = HubDecisions()
        self.lock = Condition(RLock())
        """Held for each call; notified when a unit has its first anchor."""

    def link(self, name: str, *, tamper: Tamper | None = None) -> "InProcessLink":
        """Join as the node `name` and return its `Link`. tamper: changes each push that the node sends."""
        return InProcessLink(self, name, tamper)

    def join(self, name: str) -> int:
        """Become a member and return the node's index. Raises Denied if the hub does not take it in."""
        joiner = Joiner(name=name, layout=self.layout, facts=(), num_samples=_SAMPLES)
        with self.lock:
            self._apply(self.hub.join(joiner, self.clock()))
            return self.hub.state.names[name]

    def offer(self, push: Push, used: Sequence[tuple[int, int]] = ()) -> None:
        """Judge a push, and merge if that makes a merge due. Raises Denied if its node is no live member.

        used: blocks of leased samples that are used once it is accepted.
        """
        with self.lock:
            self._apply(self.hub.offer(push, self.clock(), used))
            self.tick()

    def heartbeat(self, node: int, report: NodeReport) -> None:
        """Record what a live member says of itself, and that it is there."""
        with self.lock:
            self.hub.heartbeat(node, report, self.clock())

    def lease(self, node: int, samples: int) -> list[tuple[int, int]]:
        """Return new blocks [start, end) for a member: `samples` positions, at most `hub.lease_samples`."""
        with self.lock:
            records = self.hub.lease(node, samples, self.clock())
            self._apply(records)
        return [(record.start, record.end) for record in records if isinstance(record, Leased)]

    def use(self, node: int, start: int, upto: int) -> None:
        """Record that the samples of the lease from `start` up to `upto` are in accepted pushes."""
        with self.lock:
            self._apply(self.hub.use(node, [(start, upto)]))

    def leave(self, node: int) -> None:
        """Take out a member that has pushed what it owed."""
        with self.lock:
            self._apply(self.hub.leave(node))

    def tick(self) -> None:
        """Do everything that is due at the clock's time."""
        with self.lock:
            while records := self.hub.tick(self.clock()):
                self._apply(records)

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            computed = self.hub.compute(record)
            self.hub.apply(record, computed)
            match record:
                case Accepted(push):
                    self.tally.accepted.append(push.node)
                case Refused(node, _, _, reason):
                    self.tally.refused.append((node, reason))
                case Merged(_, _, parts):
                    ignored = computed.ignored if computed else ()
                    self.lock.notify_all()
                    self.tally.staleness += [part.staleness for part in parts]
                    self.tally.ignored += [
                        p.node for p in parts if not p.weight or (p.node, p.seq) in ignored
                    ]


class InProcessLink:
    """A trainer's `Link` to an `InProcessHub`: what is sent is decided in the call."""

    def __init__(self, hub: InProcessHub, name: str, tamper: Tamper | None = None) -> None:
        self.hub, self.name, self._tamper = hub, name, tamper
        self.node = hub.join(name)
        self.anchors: Sequence[Vector] = [np.zeros(u.numel, np.float32) for u in hub.layout.units]
        self.outbox: Sequence[Vector] = [np.zeros(u.numel, np.float32) for u in hub.layout.units]
        self.bytes_sent = 0
        self._before: dict[int, int] = {}
        """Number of pushes of earlier processes of this name, and of those that founded the run, by unit,
        less the exchanges of this one without steps, which push nothing."""
        self._asked: dict[int, int] = {}
        """Last exchange without steps, by unit."""
        self._leases = Leases()
        self._blocks: list[tuple[int, int]] = []
        self._told = (0, hub.clock())
        """Inner steps at the last `tell`, and when that was."""

    @property
    def is_member(self) -> bool:
        """Return whether the node is a member: False after it left, was excluded, or was silent too long."""
        return self.hub.hub.state.members[self.node].live

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Fetch every unit, and return the version of each.

        The first node of a run founds it with `anchors`; others wait for that node.

        Raises TimeoutError if the first node does not found the run in time, or if this node was silent for
        longer than `hub.expire_s` since this link was made.
        """
        with self.hub.lock:
            if not self.is_member:
                expire_s = self.hub.hub.plan.hub.expire_s
                raise TimeoutError(
                    f"node {self.name!r} was silent for longer than hub.expire_s = {expire_s:g} s before it"
                    " joined: make a new link"
                )
            state = self.hub.hub.state
            if not state.is_founded and state.founder == self.node:
                for unit, anchor in enumerate(self.anchors):
                    self._push(unit, 1, anchor, {"base": 0, "steps": 0, "tokens": 0})
            if not self.hub.lock.wait_for(lambda: state.is_founded, timeout_s):
                first = "" if state.founder is None else state.members[state.founder].name
                raise TimeoutError(
                    f"node {first!r}, the first of this run, has not called `join` within {timeout_s:g} s: it"
                    " brings the first anchors"
                )
            self._before = dict(self.hub.hub.state.members[self.node].received)
            return tuple(self._fetch(unit) for unit in range(len(self.anchors)))

    def written(self, unit: int, seq: int) -> None:
        """See `Link.written`. There is one rank, which calls `send` next."""

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int, used: int = 0) -> None:
        """Push outbox[unit]. A node that is no member any more pushes nothing and gets no answer."""
        if not steps:
            self._asked[unit] = seq
            self._before[unit] = self._before.get(unit, 0) - 1
            return
        facts = {"base": base, "steps": steps, "tokens": tokens}
        self._push(unit, seq + self._before.get(unit, 0), self.outbox[unit], facts, used)

    def answer(self, unit: int, seq: int) -> Answer | None:
        """Return the hub's decision on push `seq` once there is one; anchors[unit] is then the newest."""
        with self.hub.lock:
            self.hub.tick()
            if self._asked.get(unit) == seq:
                return Answer(seq, self._fetch(unit), Verdict.NONE)
            last = self.hub.hub.state.members[self.node].decisions.get(unit)
            if last is None or last.seq != seq + self._before.get(unit, 0) or last.verdict == Verdict.NONE:
                return None
            return Answer(seq, self._fetch(unit), last.verdict)

    def news(self) -> News:
        """Return what the hub says now."""
        with self.hub.lock:
            return run_news(self.hub.hub, self.node, self.hub.clock())

    def tell(self, progress: Progress) -> None:
        """Report steps and speed since the last call, and the samples that are used."""
        with self.hub.lock:
            if not self.is_member:
                return
            steps, at_s = self._told
            now = self.hub.clock()
            speed = (progress.steps - steps) / (now - at_s) if now > at_s else 0.0
            self._told = progress.steps, now
            report = NodeReport(
                steps=progress.steps, tokens=progress.tokens, steps_per_s=speed, state="training"
            )
            self.hub.heartbeat(self.node, replace(report, loss=progress.loss, rl=progress.rl))
            for start, upto in self._leases.consumed(progress.used):
                self.hub.use(self.node, start, upto)
            self._leases = self._leases.settle(progress.used)

    def heartbeat(self, steps_per_s: float) -> None:
        """Say that the node is there and how fast it is."""
        self.hub.heartbeat(self.node, NodeReport(steps_per_s=steps_per_s, state="training"))

    def leases(self, upto: int = 0) -> Sequence[tuple[int, int]]:
        """Return all blocks of samples handed to this node so far; see `Link.leases`."""
        with self.hub.lock:
            while self.is_member and (missing := upto - self._leases.num_samples) > 0:
                blocks = self.hub.lease(self.node, max(missing, self._leases.least))
                leases = self._leases.more(blocks)
                self._leases = leases.give(leases.num_samples)
                self._blocks += blocks
            return self._blocks

    def residuals(self) -> Mapping[int, Vector]:
        """Return nothing: values are sent as they are, so there is no error feedback."""
        return {}

    def leave(self, timeout_s: float) -> None:
        """Leave the run."""
        self.hub.leave(self.node)

    def _push(self, unit: int, seq: int, values: Vector, facts: dict[str, int], used: int = 0) -> None:
        layout = self.hub.layout.units[unit]
        push = make_push(values.copy(), layout, node=self.node, unit=unit, seq=seq, **facts)
        self.bytes_sent += values.nbytes
        with self.hub.lock:
            if self.is_member:
                offered = self._tamper(push) if self._tamper and facts["base"] else push
                self.hub.offer(offered, self._leases.consumed(used))

    def _fetch(self, unit: int) -> int:
        version, values = self.hub.hub.anchor(unit)
        self.anchors[unit][:] = values
        return version
