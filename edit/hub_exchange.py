"""`HubExchange`: exchange with a hub, in which no node waits for another node.

The hub owns the anchors. A node measures its pseudo-gradient D = anchor - local from the newest anchor it
has, gives it to its agent and trains on. When the hub has decided, the unit continues from the newest anchor
plus the steps made since (`landing = "arrival"`). A refused push loses nothing: the unit continues from
anchor - D, so that D is part of the next push.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from aedit import traces
from aedit.async_sgd.rules import PenaltyConfig
from aedit.edit import flat_layout
from aedit.edit.anchor_store import history, named_history
from aedit.edit.config import EditConfig
from aedit.edit.detector import NormHistory, judge, replace_units
from aedit.edit.exchange import Immediate, LocalNotes, RoundOutcome, check_new, mark_taken
from aedit.edit.flat_layout import SharedVector
from aedit.edit.hub_join import HubNodeOptions, Positions, StepReport, check_units, open_link, shared_drafter
from aedit.edit.schedule import Notes, RoundSchedule
from aedit.edit.shards import Shards, local, shards_of
from aedit.edit.shared_module import TrainedApart
from aedit.edit.units import SyncUnit, UnitSteps
from aedit.proto.agent import AgentLink, AgentLost, Answer, Link, NodeRefused
from aedit.proto.transports import PeersMissing, Pending, Rows
from aedit.types import NonNegativeInt, PositiveFloat, PositiveInt, Round, UnitLayout, Verdict, checked

WITHDRAW_S = 10.0
"""Longest time to leave the run after an error."""
POLL_S = 0.005


@dataclass(slots=True)
class UnitProgress:
    """The state of one unit's exchange on this node."""

    anchors: SharedVector
    outbox: SharedVector
    version: int = 0
    """Version of the anchor from which the next pseudo-gradient is measured."""
    seq: int = 0
    sent_steps: int = 0
    """Inner steps in the push under way."""
    opened_steps: int = 0
    """Inner steps of this attempt when the unit's last round was opened."""
    used_steps: int = 0
    opened_samples: int = 0
    """Samples that the steps of this attempt had used up when the unit's last round was opened."""
    used_samples: int = 0
    answer: Answer | None = None
    span: traces.TraceSpan = traces.OFF
    """Of the push under way, on the first rank."""

    def use(self) -> None:
        """Count the steps of the unit's last round as used."""
        self.used_steps, self.used_samples = self.opened_steps, self.opened_samples


class PendingPush(Pending[Tensor]):
    """Push of one unit, `Pending` until the hub has decided; it is sent as soon as the outbox is written.

    Without steps it is a question for the newest anchor.
    """

    def __init__(self, sender: "HubExchange", i: int, unit: SyncUnit, place: UnitProgress) -> None:
        self._sender, self._i, self._unit, self._place, self._seq = sender, i, unit, place, place.seq
        place.outbox.when_written(self._send)
        self.done()  # a hub in this process has decided by now

    def _send(self) -> None:
        place, link, steps = self._place, self._sender.link, self._place.sent_steps
        link.written(self._i, self._seq)
        if self._sender.shards.leads:
            tokens = steps * self._sender.tokens_per_step
            used = 0 if self._sender._is_apart(self._i) else place.opened_samples
            with traces.below(place.span):
                link.send(self._i, self._seq, base=place.version, steps=steps, tokens=tokens, used=used)

    def done(self) -> bool:
        """Return whether the answer is there. Never waits."""
        if self._place.answer is None:
            answer = self._place.answer = self._sender.link.answer(self._i, self._seq)
            if answer is not None:
                self._place.span.end(verdict=answer.verdict.name, version=answer.version)
        return self._place.answer is not None

    def verdict(self) -> Verdict:
        """Wait for the answer and return the hub's decision.

        Raises:
            PeersMissing: No answer came within `timeout_s`.
        """
        timeout_s = self._sender.timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                push = f"unit {self._unit.name}, push {self._seq}"
                raise PeersMissing(f"the hub's answer for {push} did not come within {timeout_s:g} s")
            time.sleep(POLL_S)
        assert self._place.answer is not None
        return self._place.answer.verdict

    def result(self) -> Tensor:
        """Wait for the answer and return the next anchor, this rank's part as an fp32 vector.

        If the push was refused, return the anchor less the pseudo-gradient, which the next push then
        contains.
        """
        refused = self.verdict() == Verdict.REFUSED
        anchor = self._place.anchors.read()
        if not refused:
            return anchor
        return self._unit.representable(anchor) - self._place.outbox.read()


class PushDetector:
    """Compare the norms of a node's pushes with its own earlier norms.

    The number of steps in a push varies with the pace, and after an outage. Correct norms grow with it, but
    no faster. So a unit is distrusted only if its norm is too large both as it is (fewer steps cannot explain
    it) and per step (more steps cannot).

    Args:
        num_units: Number of units of the model.
        config: Threshold and length of the history.
    """

    def __init__(self, num_units: int, config: PenaltyConfig) -> None:
        self.norms = self.norms_per_step = NormHistory.empty(num_units, config.window)
        self._num_units, self._config = num_units, config

    def distrusted(
        self, G_L: Tensor, steps_L: Tensor, units: Sequence[int], apart: Sequence[int] = ()
    ) -> frozenset[int]:
        """Return the units whose norm is not credible, and add the norms of the others to the history.

        Args:
            G_L: Norms of `units`, float64.
            steps_L: Inner steps in the next push of every unit of the model, float64.
            units: The units of the round.
            apart: Those of them that are distrusted only if their norm is not finite.
        """
        at = list(units)
        all_L = torch.zeros(self._num_units, dtype=torch.float64)
        all_L[at] = G_L
        believed_L, norms = judge(all_L, self.norms, self._config)
        per_step = judge(all_L / steps_L.clamp(min=1), self.norms_per_step, self._config)
        self.norms = replace_units(self.norms, norms, at)
        self.norms_per_step = replace_units(self.norms_per_step, per_step[1], at)
        suspect_L = believed_L.isinf() & per_step[0].isinf()
        suspect_L[list(apart)] &= ~all_L[list(apart)].isfinite()
        return frozenset(i for i in units if suspect_L[i])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the histories by name."""
        return named_history("history", self.norms) | named_history("history_per_step", self.norms_per_step)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.norms = history("history", state)
        self.norms_per_step = history("history_per_step", state)


@checked()
class HubExchange:
    """One node of an asynchronous run. Make one with `HubExchange.join`.

    Args:
        link: Connection to the agent of this node, and through it to the hub.
        max_steps_ahead: Inner steps that training goes on without an answer.
        tokens_per_step: Tokens of the whole node in an inner step.
        penalty: Only its detector is used here, on the node's own progress; the hub sets the weights.
        timeout_s: Longest wait for the first anchors, for an answer, and for leaving the run.
    """

    asynchronous = True

    def __init__(
        self,
        link: Link,
        *,
        max_steps_ahead: PositiveInt = 1024,
        tokens_per_step: NonNegativeInt = 0,
        penalty: PenaltyConfig | None = None,
        timeout_s: PositiveFloat = 1800.0,
    ) -> None:
        self.link, self.max_steps_ahead, self.tokens_per_step = link, max_steps_ahead, tokens_per_step
        self.penalty = penalty or PenaltyConfig()
        self.timeout_s = timeout_s
        self.offload = False
        self.units: Sequence[SyncUnit] = ()
        self.apart: Sequence[SyncUnit] = ()
        self.shards = Shards()
        self.notes: Notes = LocalNotes()
        self.before_leaving: Callable[[], None] = self._report_used
        """Called when all answers are there, before the node leaves: samples that the hub does not know to be
        used by then go to other nodes."""
        self.samples_upto: Callable[[int], int] = lambda steps: self.report.trained if self.report else 0
        """Returns the samples, of those drawn in this attempt, that its first steps have used up."""
        self.report: StepReport | None = None
        """Report to the hub after each step, if this exchange was made by `join`."""
        self.joined_units: tuple[UnitLayout, ...] | None = None
        """Units of the model that was joined with, if this exchange was made by `join`."""
        self.own_steps = 0
        """Inner steps in the rounds opened so far, in this attempt."""
        self.steps_L = torch.zeros(0, dtype=torch.float64)
        """Inner steps of each unit that are in no push yet."""
        self.unit_steps = UnitSteps()  # of units that are trained apart: register them first
        self.detector = PushDetector(0, self.penalty)
        self._places: list[UnitProgress] = []
        self._under_way: dict[int, PendingPush] = {}
        self._distrusted: frozenset[int] = frozenset()
        self._left = self._traces = False

    @classmethod
    def join(
        cls,
        address: str,
        model: nn.Module,
        *,
        name: str,
        keys: str | Path | Literal[False] | None = None,
        num_samples: int = 0,
        directory: str | Path | None = None,
        drafter: TrainedApart | None = None,
        tokens_per_step: int = 0,
        traces: str = "",
        trace_ratio: float = 1.0,
    ) -> "HubExchange":
        """Return the exchange of a node of the run that the hub at `address` leads.

        The hub sets everything else: units, interval, pace, codecs, deadlines. The node becomes a member when
        `LayerSync` is entered: the parameters of the first node become the anchors of the run, and every
        later node takes over the anchors. All ranks of a node call this together, after `fully_shard`.

            exchange = HubExchange.join("10.0.0.1:7000", model, name="a", keys="keys/nodes")
            sync = LayerSync.of(model, inner, exchange=exchange)

        Args:
            address: HOST:PORT of the hub, or of several that split the units, separated by commas.
            model: Any module. Its trainable parameters must have the names and shapes of the run's.
            name: Name of the node, kept over restarts: the same name gets the same index, data, records.
            keys: Folder that `aedit keys` wrote for nodes; None: a hub on this machine without TLS; False: no
                TLS, although the hub is another machine.
            num_samples: Samples of the data set, equal on all nodes: with it, `lease` gives positions.
            directory: Folder in which the node keeps the secret that lets it come back at once after a crash.
            drafter: An `OnlineDrafter` that the nodes of the run share; the hub has `drafter.kind = "layer"`
                then.
            tokens_per_step: Tokens of the whole node in an inner step, for runs that weigh pushes by them.
            traces: URL of an OTLP receiver over HTTP, which gets a trace of each push until the node leaves;
                empty: no traces. Needs the extra `otel`.
            trace_ratio: Share of the pushes that are traced, chosen at random.

        Raises:
            ValueError: No hub answers within 10 seconds, it refuses this node, the keys cannot be read, or
                the model does not have the units that the run names.
        """
        options = HubNodeOptions(
            name=name,
            keys=keys,
            num_samples=num_samples,
            directory=directory,
            drafter=drafter,
            traces=traces,
            trace_ratio=trace_ratio,
        )
        return cls.of(address, model, options, tokens_per_step)

    @classmethod
    def of(
        cls, address: str, model: nn.Module, options: HubNodeOptions, tokens_per_step: int = 0
    ) -> "HubExchange":
        """Return what `join` returns, with all options of the node."""
        shared, was_traced = shared_drafter(model, options), traces.is_on()
        try:
            link, settings, units = open_link(address, model, options, shared)
        except ValueError:
            if not was_traced:
                traces.end_traces()
            raise
        exchange = cls(
            link,
            max_steps_ahead=settings.hub.max_steps_ahead,
            tokens_per_step=tokens_per_step,
            penalty=settings.edit.penalty,
            timeout_s=settings.edit.timeout_s,
        )
        exchange.joined_units = units
        exchange._traces = traces.is_on() and not was_traced
        if shared is not None and options.drafter is not None:
            shared.attach(exchange)
            shared.connect(options.drafter, shards_of(list(model.parameters())))
        leases = options.num_samples > 0
        exchange.report = StepReport(link, settings, tokens_per_step=tokens_per_step, leases_data=leases)
        if settings.hub.weights == "tokens" and not tokens_per_step:
            exchange.close()
            raise ValueError('tokens_per_step must be above 0: this run has hub.weights = "tokens"')
        return exchange

    @property
    def node(self) -> int:
        """Return the index of this node in the run, once it is a member."""
        return self.link.node

    @property
    def loss(self) -> float:
        """Return the training loss that the views of the run show. Assign it as often as you like."""
        return self.report.loss if self.report else float("nan")

    @loss.setter
    def loss(self, loss: float) -> None:
        if self.report:
            self.report.loss = loss

    @property
    def finished(self) -> bool:
        """Return whether the run has used up its budget of steps or time, by the hub's last report.

        All ranks of the node call it together.
        """
        return self.shards.decide([self.link.news().finished])[0] == 1

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes that the agent has sent."""
        return self.link.bytes_sent

    @property
    def used_steps(self) -> int:
        """Return the inner steps of this attempt that are settled in every unit.

        Merged, or dropped as distrusted. Their samples need not be drawn again.
        """
        return min(place.used_steps for place in self._places)

    @property
    def used_samples(self) -> int:
        """Return the samples from `lease` that are settled in every unit, as `used_steps` counts steps."""
        return min(place.used_samples for place in self._places)

    def bind(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        """Store the units, and map the memory that this node shares with its agent.

        Raises:
            ValueError: The units have other sizes than those that the exchange was made for, or it serves
                another `LayerSync`.
        """
        check_new(self.link, "call HubExchange.join for each LayerSync")
        self.units, self.shards = units, shards
        check_units(units, self.link, self.joined_units)
        self.detector = PushDetector(len(units), self.penalty)
        self.steps_L = torch.zeros(len(units), dtype=torch.float64)
        device = local(units[0].params[0]).device
        if device.type == "cuda":
            flat_layout.pin([*self.link.anchors, *self.link.outbox])
        for i, unit in enumerate(units):
            slices = flat_layout.owned_slices(unit, shards)
            anchors, outbox = (
                SharedVector(v[i], slices, device) for v in (self.link.anchors, self.link.outbox)
            )
            self._places.append(UnitProgress(anchors, outbox))
        mark_taken(self.link)

    def compare(self, settings: Mapping[str, str]) -> None:
        """Raise ValueError if this node has left. The hub compares layout and method when the node joins."""
        if self._left:
            raise ValueError(
                "this node has left the run at the end of its `with sync:` block: put one block around all "
                "epochs, or call HubExchange.join and LayerSync.of again for each"
            )

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
        if self.report:
            self.report.begin(self.shards)

    def defaults(self) -> tuple[EditConfig, RoundSchedule] | None:
        """Return configuration and schedule of the run, or None if this exchange was not made by `join`."""
        if self.report is None:
            return None
        settings = self.report.settings
        return settings.edit, settings.schedule(self.link)

    def lease(self, n: int) -> Positions:
        """Draw the positions of the next `n` samples of the run's data; int64, shape [n].

        The hub leases each position of the endless stream 0, 1, 2, ... to one node only: sample `position %
        num_samples` of epoch `position // num_samples`. Draw the samples of a step between the `sync.step()`
        before it and its own. They count as used when the step is in a push that the hub has accepted;
        samples that a node has drawn and not used when it ends go to another node.

        All ranks of the node call this together and get the same positions. The result is empty when the run
        has used up its budget.

        Raises:
            ValueError: The exchange was made without `num_samples`.
            PeersMissing: The hub was away, and all positions that it had leased are used up.
        """
        if self.report is None:
            raise ValueError(
                "this exchange leases no data: make it with HubExchange.join(..., num_samples=...)"
            )
        return self.report.draw(n)

    def note_step(self, steps: int, waited_s: float) -> None:
        """Report an inner step to the hub, through the agent."""
        if self.report:
            self.report.step(steps, waited_s, self.used_samples)

    def _report_used(self) -> None:
        if self.report:
            self.report.send(self.used_samples)

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Raise ValueError: nodes of a hub do not average values at every step."""
        raise ValueError("nodes of a hub average no values at every step: set edit.warmup_steps = 0")

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return the row of this node alone."""
        return Immediate(lambda: Rows(row.unsqueeze(0), 0))

    @torch.no_grad()
    def open(self, round: Round, units: Sequence[int], *, leaving: bool = False) -> Pending[RoundOutcome]:
        """Measure and judge the norms of `units`. The outcome is there at once: no other node is asked."""
        self.own_steps += round.steps
        self.steps_L += self.unit_steps.new(self.units, round.steps, self.shards)
        G_L = self._measure(units)
        apart = [i for i in units if self._is_apart(i)]
        self._distrusted = self.detector.distrusted(G_L, self.steps_L, units, apart)
        used = self.samples_upto(self.own_steps)
        for i in units:
            self._places[i].opened_steps = self.own_steps
            self._places[i].opened_samples = used
        news = self.link.news()
        nodes, total_steps = self.shards.decide([news.nodes, news.total_steps])
        outcome = RoundOutcome(
            round,
            tuple(units),
            norms=tuple(G_L.tolist()),
            distrusted=tuple(sorted(self._distrusted)),
            nodes=nodes,
            total_steps=total_steps,
            all_leaving=leaving,
        )
        return Immediate(lambda: outcome)

    def start(self, i: int) -> Pending[Tensor]:
        """Push the pseudo-gradient of unit `i`; the answer is its next anchor.

        A unit that is distrusted or has made no steps is not pushed. Of one that is trained apart from the
        model the answer is then the anchor that others have trained.
        """
        place, steps = self._places[i], int(self.steps_L[i])
        self.steps_L[i] = 0
        if i in self._distrusted or (steps == 0 and not self._is_apart(i)):
            place.answer = None
            return Immediate(place.anchors.read)
        place.seq += 1
        place.sent_steps = steps
        place.span = traces.OFF
        if self.shards.leads and steps:
            place.span = traces.opened(
                "push",
                root=True,
                links=traces.trained_groups(steps),
                unit=self.units[i].name,
                seq=place.seq,
                steps=steps,
            )
        push = self._under_way[i] = PendingPush(self, i, self.units[i], place)
        return push

    def conclude(self, i: int, outcome: RoundOutcome) -> RoundOutcome:
        """Return `outcome`, completed by the hub's decision on unit `i`."""
        place = self._places[i]
        answer, place.answer = place.answer, None
        self._under_way.pop(i, None)
        if answer is None:  # nothing was sent
            place.use()
            return outcome
        place.version = answer.version
        if answer.verdict == Verdict.REFUSED:
            self.steps_L[i] += place.sent_steps
            return replace(outcome, refused=(*outcome.refused, i))
        place.use()
        if answer.verdict == Verdict.DISTRUSTED:
            return replace(outcome, distrusted=(*outcome.distrusted, i))
        return outcome

    def abandon(self) -> None:
        """Do nothing: the agent delivers what it was given, and no one reads its answers."""

    def leave(self) -> None:
        """Report the last used samples and leave the run."""
        self._left = True
        self.before_leaving()
        if self.shards.leads:
            self.link.leave(self.timeout_s)
        self._end_traces()

    def withdraw(self) -> None:
        """Leave within 10 seconds, so that the hub need not wait until this node counts as lost."""
        self._left = True
        if self.report is None:
            return
        self.timeout_s = min(self.timeout_s, WITHDRAW_S)
        with suppress(PeersMissing, TimeoutError, AgentLost, NodeRefused):
            for i, push in self._under_way.items():
                if push.verdict() != Verdict.REFUSED:
                    self._places[i].use()
            self._report_used()
            if self.shards.leads:
                self.link.leave(self.timeout_s)
        self._end_traces()

    def close(self) -> None:
        """End the node's agent, if the exchange is not entered after all. The hub gets no notice."""
        if isinstance(self.link, AgentLink):
            self.link.stop()
        self._end_traces()

    def _end_traces(self) -> None:
        """Export what is left of the traces that began with this exchange."""
        if self._traces:
            self._traces = False
            traces.end_traces()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the histories of the node's norms, and the residuals of its codec.

        The hub keeps the anchors.

        While a push is under way its residual may be only partly updated: a crash right after a checkpoint
        does the same, and training goes on from either value.
        """
        state = self.detector.state_dict()
        for i, residual in self.link.residuals().items():
            state[f"residual/{self.units[i].name}"] = torch.from_numpy(residual)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, before the node joins."""
        self.detector.load_state_dict(state)
        for i, residual in self.link.residuals().items():
            residual[:] = state[f"residual/{self.units[i].name}"].numpy()

    def allocate(self) -> None:
        """Do nothing: a node of a hub saves no anchors."""

    def _is_apart(self, i: int) -> bool:
        return self.units[i].name in self.unit_steps

    def _measure(self, units: Sequence[int]) -> Tensor:
        """Write D of each unit into the outbox; return its norm over the node's ranks, float64 on CPU."""
        squares = []
        for i in units:
            unit, place = self.units[i], self._places[i]
            D = torch.sub(unit.representable(place.anchors.read()), unit.value(), out=place.outbox.target())
            squares.append(torch.linalg.vector_norm(D).square())
            if place.outbox.target() is None:
                place.outbox.write(D)
        return self.shards.sum(torch.stack(squares)).double().sqrt().cpu()
