"""A real hub without network or files: its records are applied as soon as they are decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.hub.joins import Joiner
from aedit.async_sgd.hub.members import Report
from aedit.async_sgd.rules.records import (
    Accepted,
    Layout,
    Merged,
    Push,
    Record,
    Refused,
    TensorLayout,
    UnitLayout,
    Vector,
)
from aedit.edit.units import find_units
from aedit.proto.agent.link import Answer, News, Progress, Verdict

_VERDICTS = {"merged": Verdict.MERGED, "refused": Verdict.REFUSED, "distrusted": Verdict.DISTRUSTED}

Tamper = Callable[[Push], Push]


@dataclass(frozen=True, slots=True)
class Held:
    """`Values` in memory."""

    array: Vector

    def read(self, start: int, stop: int) -> Vector:
        return self.array[start:stop].copy()


def layout_of(model: nn.Module) -> Layout:
    """What a hub must know of `model`, one unit per layer."""
    units = [
        UnitLayout(
            unit.name,
            tuple(TensorLayout(n, tuple(p.shape)) for n, p in zip(unit.names, unit.params, strict=True)),
        )
        for unit in find_units(model, "auto")
    ]
    return Layout(tuple(units))


def push_of(values: Vector, layout: UnitLayout, **facts: int) -> Push:
    """A push as the hub's driver makes it of what has arrived, norms measured."""
    ends = np.cumsum([tensor.numel for tensor in layout.tensors])
    with np.errstate(over="ignore", invalid="ignore"):
        norms = tuple(float(np.linalg.norm(part.astype(np.float64))) for part in np.split(values, ends[:-1]))
    return Push(values=Held(values), norms=norms, **facts)


@dataclass(slots=True)
class Tally:
    """What the hub decided, by node."""

    accepted: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    away: list[int] = field(default_factory=list)
    """Nodes whose push of a unit did not count in its merge."""


class HubInProcess:
    """Drives a `Hub`."""

    def __init__(self, hub: Hub, layout: Layout) -> None:
        self.hub, self.layout = hub, layout
        self.tally = Tally()
        self.now_s = 0.0

    def join(self, name: str) -> int:
        joiner = Joiner(name=name, layout=self.layout, facts=(), num_samples=1 << 40)
        self._apply(self.hub.join(joiner, self.now_s))
        return self.hub.state.names[name]

    def offer(self, push: Push) -> None:
        """Have it judged, and merged if that makes a merge due."""
        self._apply(self.hub.offer(push, self.now_s))
        self.tick()

    def leave(self, node: int) -> None:
        """It has pushed what it owed."""
        self._apply(self.hub.leave(node))

    def tick(self) -> None:
        """Everything that is due now."""
        while records := self.hub.tick(self.now_s):
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
                    self.tally.staleness += [part.staleness for part in parts]
                    self.tally.away += [p.node for p in parts if not p.weight or (p.node, p.seq) in ignored]


class DirectLink:
    """A trainer's `Link` to a `HubInProcess`. tamper: what a broken or lying node sends instead."""

    def __init__(self, hub: HubInProcess, name: str, tamper: Tamper | None = None) -> None:
        self.hub, self._tamper = hub, tamper
        self.node = hub.join(name)
        numels = [unit.numel for unit in hub.layout.units]
        self.anchors: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.outbox: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.bytes_sent = 0
        self._before: dict[int, int] = {}
        """By unit: pushes that this node's name has made before, in founding or in an earlier attempt."""

    def join(self, timeout_s: float) -> tuple[int, ...]:
        if not self.hub.hub.state.is_founded:
            for unit in range(len(self.anchors)):
                self._push(unit, 1, self.anchors[unit], {"base": 0, "steps": 0, "tokens": 0})
        self._before = dict(self.hub.hub.state.members[self.node].received)
        return tuple(self._pull(unit) for unit in range(len(self.anchors)))

    def written(self, unit: int, seq: int) -> None:
        pass

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int) -> None:
        facts = {"base": base, "steps": steps, "tokens": tokens}
        self._push(unit, seq + self._before.get(unit, 0), self.outbox[unit], facts)

    def _push(self, unit: int, seq: int, values: Vector, facts: dict[str, int]) -> None:
        layout = self.hub.layout.units[unit]
        push = push_of(values.copy(), layout, node=self.node, unit=unit, seq=seq, **facts)
        self.bytes_sent += values.nbytes
        if self.is_member:
            self.hub.offer(self._tamper(push) if self._tamper and facts["base"] else push)

    def _pull(self, unit: int) -> int:
        version, values = self.hub.hub.anchor(unit)
        self.anchors[unit][:] = values
        return version

    def answer(self, unit: int, seq: int) -> Answer | None:
        told = self.hub.hub.state.members[self.node].told.get(unit)
        if told is None or told.seq != seq + self._before.get(unit, 0) or told.verdict == "none":
            return None
        return Answer(seq, self._pull(unit), _VERDICTS[told.verdict])

    def news(self) -> News:
        hub = self.hub.hub
        live = hub.state.live
        pace = hub.pace_steps(self.node) if self.node in live else 0
        return News(age_s=0.0, round=hub.state.round, pace_steps=pace, nodes=len(live))

    @property
    def is_member(self) -> bool:
        """False once the hub has put the node out."""
        return self.hub.hub.state.members[self.node].live

    def beat(self, steps_per_s: float) -> None:
        """Say that the node is there and how fast it is."""
        self.hub.hub.beat(self.node, Report(steps_per_s=steps_per_s, state="training"), self.hub.now_s)

    def tell(self, progress: Progress) -> None:
        pass

    def leases(self) -> Sequence[tuple[int, int]]:
        return ()

    def residuals(self) -> dict[int, Vector]:
        return {}

    def leave(self, timeout_s: float) -> None:
        self.hub.leave(self.node)
