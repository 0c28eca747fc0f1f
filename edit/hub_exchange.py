"""The exchange with a hub: every node on its own, nobody waits for anybody.

The anchors belong to the hub. A node measures its pseudo-gradient D = anchor - local from the newest anchor
it has, hands it to its agent and trains on; some time later the hub has decided, and the unit goes on from
the newest anchor with the steps made meanwhile on top (`landing = "arrival"`). A push that is refused loses
nothing: the unit goes on from anchor - D, so that D is part of the next one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from aedit.edit import canonical
from aedit.edit.canonical import SharedVector
from aedit.edit.config import PenaltyConfig
from aedit.edit.detector import NormHistory, judge, learned_only
from aedit.edit.exchange import Verdict
from aedit.edit.named import history, named_history
from aedit.edit.schedule import Notes
from aedit.edit.shards import Shards, local
from aedit.edit.units import SyncUnit
from aedit.proto.agent import link as wire
from aedit.proto.agent.link import Answer, Link
from aedit.proto.transports.transport import PeersMissing, Pending, Rows
from aedit.types import Round

T = TypeVar("T")

POLL_S = 0.005


class HubExchange:
    """One node of an asynchronous run; `link` leads to its agent and on to the hub.

    max_steps_ahead: training goes on for so many steps without an answer. tokens_per_step: of the whole
    node. penalty: only its detector is used here, for what the node believes of itself; weights are the
    hub's. timeout_s: longest wait before the first anchors, for an answer, and for a farewell.
    """

    asynchronous = True

    def __init__(
        self,
        link: Link,
        *,
        max_steps_ahead: int = 1024,
        tokens_per_step: int = 0,
        penalty: PenaltyConfig | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.link, self.max_steps_ahead, self.tokens_per_step = link, max_steps_ahead, tokens_per_step
        self.penalty = penalty or PenaltyConfig()
        self.timeout_s = timeout_s
        self.offload = False
        self.units: Sequence[SyncUnit] = ()
        self.shards = Shards()
        self.notes: Notes = OwnNotes()
        self.before_leaving: Callable[[], None] = lambda: None
        """Called when the last answer is here, before the goodbye: what the hub has not been told to be used
        up by then, it gives to others."""
        self.own_steps = 0
        """Inner steps in the rounds opened so far, in this attempt."""
        self.steps_L = torch.zeros(0, dtype=torch.float64)
        """Inner steps whose progress no push has taken; unit by unit."""
        self.norms = NormHistory.empty(0, self.penalty.window)
        self.norms_per_step = self.norms
        self._places: list[_Place] = []
        self._distrusted: frozenset[int] = frozenset()

    @property
    def bytes_sent(self) -> int:
        return self.link.bytes_sent

    @property
    def used_steps(self) -> int:
        """Inner steps of this attempt that are behind it for good: every unit's share of them has been
        merged, or given up as distrusted. What was drawn for them need not be drawn again."""
        return min(place.used_steps for place in self._places)

    def bind(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        self.units, self.shards = units, shards
        self.norms = self.norms_per_step = NormHistory.empty(len(units), self.penalty.window)
        self.steps_L = torch.zeros(len(units), dtype=torch.float64)
        device = local(units[0].params[0]).device
        if device.type == "cuda":
            canonical.pin([*self.link.anchors, *self.link.outbox])
        for i, unit in enumerate(units):
            slices = canonical.owned(unit, shards)
            anchors, outbox = (
                SharedVector(v[i], slices, device) for v in (self.link.anchors, self.link.outbox)
            )
            self._places.append(_Place(anchors, outbox))

    def compare(self, settings: Mapping[str, str]) -> None:
        """Do nothing: the hub compares layout and method with its own when the node joins."""

    def anchor(self) -> None:
        """Become a member of the run and take its anchors; the first node's parameters become them."""
        for unit, place in zip(self.units, self._places, strict=True):
            place.anchors.write(unit.flat())
        while not all(self.shards.all([place.anchors.written() for place in self._places])):
            time.sleep(POLL_S)
        versions = self.link.join(self.timeout_s) if self.shards.leads else [0] * len(self.units)
        for place, version in zip(self._places, self.shards.decide(versions), strict=True):
            place.version = version
        for unit, place in zip(self.units, self._places, strict=True):
            unit.adopt(place.anchors.read())

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        raise ValueError("nodes of a hub do not meet at every step: set edit.warmup_steps = 0")

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        return Here(lambda: Rows(row.unsqueeze(0), 0))

    @torch.no_grad()
    def open(self, round: Round, units: Sequence[int], *, leaving: bool = False) -> Pending[Verdict]:
        """Measure and judge; nothing is asked of the others, so the verdict is there at once."""
        self.own_steps += round.steps
        self.steps_L += round.steps
        G_L = self._measure(units)
        self._distrusted = self._judge(G_L, units)
        for i in units:
            self._places[i].opened_steps = self.own_steps
        news = self.link.news()
        nodes, total_steps = self.shards.decide([news.nodes, news.total_steps])
        verdict = Verdict(
            round,
            tuple(units),
            norms=tuple(G_L.tolist()),
            distrusted=tuple(sorted(self._distrusted)),
            nodes=nodes,
            total_steps=total_steps,
            all_leaving=leaving,
        )
        return Here(lambda: verdict)

    def start(self, i: int) -> Pending[Tensor]:
        place, steps = self._places[i], int(self.steps_L[i])
        self.steps_L[i] = 0
        if i in self._distrusted or steps == 0:
            place.answer = None
            return Here(place.anchors.read)
        place.seq += 1
        place.sent_steps = steps
        return _Push(self, i, place)

    def conclude(self, i: int, verdict: Verdict) -> Verdict:
        place = self._places[i]
        answer, place.answer = place.answer, None
        if answer is None:  # nothing was sent
            place.used_steps = place.opened_steps
            return verdict
        place.version = answer.version
        if answer.verdict == wire.Verdict.REFUSED:
            self.steps_L[i] += place.sent_steps
            return replace(verdict, refused=(*verdict.refused, i))
        place.used_steps = place.opened_steps
        if answer.verdict == wire.Verdict.DISTRUSTED:
            return replace(verdict, distrusted=(*verdict.distrusted, i))
        return verdict

    def abandon(self) -> None:
        """The agent sees to what has been handed to it; nobody looks at its answers any more."""

    def leave(self) -> None:
        self.before_leaving()
        if self.shards.leads:
            self.link.leave(self.timeout_s)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the node knows of its own norms, and its codec's residuals. The anchors are the hub's.

        While a push is under way its residual may be half that before it: either half is as good as what a
        crash right after a checkpoint leaves behind.
        """
        state = named_history("history", self.norms) | named_history("history_per_step", self.norms_per_step)
        for i, residual in self.link.residuals().items():
            state[f"residual/{self.units[i].name}"] = torch.from_numpy(residual)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up norms and residuals, before the node joins."""
        self.norms = history("history", state)
        self.norms_per_step = history("history_per_step", state)
        for i, residual in self.link.residuals().items():
            residual[:] = state[f"residual/{self.units[i].name}"].numpy()

    def allocate(self) -> None:
        """Do nothing: a node of a hub saves no anchors."""

    def _measure(self, units: Sequence[int]) -> Tensor:
        """D of each unit into the outbox, and its norm over all ranks of the node, float64 on CPU."""
        squares = []
        for i in units:
            unit, place = self.units[i], self._places[i]
            D = torch.sub(unit.representable(place.anchors.read()), unit.value(), out=place.outbox.target())
            squares.append(torch.linalg.vector_norm(D).square())
            if place.outbox.target() is None:
                place.outbox.write(D)
        return self.shards.sum(torch.stack(squares)).double().sqrt().cpu()

    def _judge(self, G_L: Tensor, units: Sequence[int]) -> frozenset[int]:
        """Units whose norm this node does not believe.

        How many steps are in a push varies: with the pace, and after an outage. Honest norms grow with
        them, but no faster, so a norm is only suspect if it is too large both as it is (fewer steps cannot
        explain it) and per step (more steps cannot).
        """
        at = list(units)
        all_L = torch.zeros(len(self.units), dtype=torch.float64)
        all_L[at] = G_L
        believed_L, norms = judge(all_L, self.norms, self.penalty)
        per_step = judge(all_L / self.steps_L.clamp(min=1), self.norms_per_step, self.penalty)
        self.norms = learned_only(norms, self.norms, at)
        self.norms_per_step = learned_only(per_step[1], self.norms_per_step, at)
        suspect_L = believed_L.isinf() & per_step[0].isinf()
        return frozenset(i for i in units if suspect_L[i])


@dataclass(slots=True)
class _Place:
    """What the node knows of one unit's exchange."""

    anchors: SharedVector
    outbox: SharedVector
    version: int = 0
    """Of the anchor that the next pseudo-gradient is measured from."""
    seq: int = 0
    sent_steps: int = 0
    """Inner steps in the push under way."""
    opened_steps: int = 0
    """Inner steps of this attempt when the unit's last round was opened."""
    used_steps: int = 0
    answer: Answer | None = None


class _Push:
    """`Pending` until the hub has decided; sends once the outbox is written."""

    def __init__(self, exchange: HubExchange, i: int, place: _Place) -> None:
        self._exchange, self._i, self._place, self._seq = exchange, i, place, place.seq
        self._sent = False
        self.done()

    def done(self) -> bool:
        place, link = self._place, self._exchange.link
        if not self._sent and place.outbox.written():
            self._send(link)
        if self._sent and place.answer is None:
            place.answer = link.answer(self._i, self._seq)
        return place.answer is not None

    def result(self) -> Tensor:
        _until(self.done, self._exchange.timeout_s, f"the hub's answer for {self._name}")
        assert self._place.answer is not None
        anchor = self._place.anchors.read()
        if self._place.answer.verdict != wire.Verdict.REFUSED:
            return anchor
        return self._exchange.units[self._i].representable(anchor) - self._place.outbox.read()

    @property
    def _name(self) -> str:
        return f"unit {self._exchange.units[self._i].name}, push {self._seq}"

    def _send(self, link: Link) -> None:
        steps = self._place.sent_steps
        link.written(self._i, self._seq)
        if self._exchange.shards.leads:
            tokens = steps * self._exchange.tokens_per_step
            link.send(self._i, self._seq, base=self._place.version, steps=steps, tokens=tokens)
        self._sent = True


class Here(Pending[T]):
    """An answer that needs nobody."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self._make()


class OwnNotes:
    """Notes of a node that agrees with nobody."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self._notes.setdefault(key, text)

    def read(self, key: str) -> str | None:
        return self._notes.get(key)


def _until(there: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not there():
        if time.monotonic() > deadline:
            raise PeersMissing(f"{what} did not come within {timeout_s:g} s")
        time.sleep(POLL_S)
