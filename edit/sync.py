"""When a unit lands: layer-wise synchronisation, hidden behind the forward pass.

`forward` landing: after a round is opened, each unit's forward pre-hook starts the exchange of the units
up to `prefetch` places ahead, waits for its own, and lets the module run on the new anchor (EDiT,
arXiv:2412.07210, figure 1). `arrival` landing: nothing waits; when a unit's answer is here, the next
forward adds `anchor - sent` to the parameters, so the inner steps made meanwhile are kept and travel in
the next round.

With an asynchronous exchange a round is put off while one of its units is still under way, and its progress
goes on growing; a node that would be too many steps ahead of an answer waits for it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from aedit.edit.agreement import described
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange, Verdict
from aedit.edit.flight import Flight
from aedit.edit.schedule import RoundSchedule, make_schedule
from aedit.edit.shards import shards_of
from aedit.edit.units import SyncUnit, find_units
from aedit.edit.waiting import Waiter
from aedit.types import Round

_PROGRESS = ("schedule.last_id", "schedule.last_step")


class LayerSync(Waiter):
    """Attach EDiT to a model by hooks; `with` enters and leaves. See `LayerSync.of`."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        exchange: Exchange,
        schedule: RoundSchedule,
        config: EditConfig,
    ) -> None:
        super().__init__(shards_of(list(model.parameters())), config.timeout_s)
        self.model, self.inner = model, inner
        self.exchange, self.schedule, self.config = exchange, schedule, config
        self.free = exchange.asynchronous
        if self.free and config.warmup_steps:
            raise ValueError("edit.warmup_steps must be 0 with a hub: its nodes do not meet at every step")
        self.units: Sequence[SyncUnit] = find_units(model, config.units)
        if config.fragments > len(self.units):
            what = f"edit.fragments = {config.fragments} is more than the model's {len(self.units)} units"
            raise ValueError(what)
        self.on_round: Callable[[Verdict, float], None] = lambda verdict, waited_s: None
        self.steps = 0
        """Inner steps so far, warm-up included."""
        self.round_id = 0
        """The round landed last."""
        self.total_steps = 0
        """Inner steps of all nodes up to that round, warm-up not included."""
        self._flights: list[Flight] = []  # oldest first
        self._hooks: list[RemovableHandle] = []
        self._averaged = False
        self._compared = False
        self.anchored = False
        """Whether the first local phase has begun."""
        exchange.bind(self.units, self.shards)
        schedule.listen(exchange.notes)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        exchange: Exchange,
        schedule: RoundSchedule | None = None,
        config: EditConfig | None = None,
    ) -> "LayerSync":
        """Make `model` one node of a run.

        model: any module; shard it with `fully_shard` first if the node has several ranks.
        inner: its optimizer. exchange: where new anchors come from, such as `MeanExchange(TorchTransport())`.
        schedule: when; by default as `config` says. config: everything else. By default both are what the
        hub says, with `HubExchange.join`.

            sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySeconds(600))
            with sync:
                for batch in loader:
                    loss(model, batch).backward(); inner.step(); inner.zero_grad()
                    sync.step()
        """
        if defaults := exchange.defaults():
            config, schedule = config or defaults[0], schedule or defaults[1]
        config = config or EditConfig()
        for name in ("penalty", "offload"):
            if getattr(config, name) not in (getattr(EditConfig(), name), getattr(exchange, name, None)):
                raise ValueError(f"config.{name} has no effect here: give it to the exchange")
        return cls(model, inner, exchange, schedule or make_schedule(config), config)

    # -- attach and detach

    def __enter__(self) -> "LayerSync":
        self.compare()
        for i, unit in enumerate(self.units):
            land = _hook(partial(self._before_forward, i))
            for module in unit.modules:
                self._hooks.append(module.register_forward_pre_hook(land, prepend=True))
        self._hooks.append(self.model.register_forward_hook(_hook(self._after_forward)))
        self._hooks.append(self.inner.register_step_pre_hook(_hook(self.average_gradients)))
        if not self.warming_up and not self.anchored:
            self.anchor()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
            else:
                self.exchange.withdraw()
        finally:
            while self._hooks:
                self._hooks.pop().remove()

    # -- what the training loop calls

    @property
    def warming_up(self) -> bool:
        """Whether gradients are averaged at every step, before the first local phase."""
        return self.config.warmup_steps == "all" or self.steps < self.config.warmup_steps

    @property
    def in_flight(self) -> bool:
        """Whether a round has been opened that has not landed whole."""
        return bool(self._flights)

    @property
    def local_steps(self) -> int:
        """Inner steps since the warm-up."""
        return 0 if self.warming_up else self.steps - int(self.config.warmup_steps)

    @property
    def position(self) -> int:
        """How many meetings with the other nodes this node has gone to: warm-up steps, then rounds."""
        return self.steps - self.local_steps + self.schedule.last_id

    def step(self) -> None:
        """Count an inner step, and open a round if one is due. Call it after the inner optimizer has
        stepped."""
        self._averaged = False
        warmed_up = self.warming_up
        self.steps += 1
        self.exchange.note_step(self.steps, self.waited_s)
        if self.warming_up:
            return
        if warmed_up:
            return self.anchor()
        self._look_for_answers()
        self._hold_back()
        if round := self._due():
            self.begin(round)

    def average_gradients(self) -> None:
        """Warm-up: replace gradients by their mean over nodes. Called before the inner step by itself;
        call it before clipping gradients, so that what is clipped is the mean. A node with a NaN or Inf is
        left out of a unit."""
        if not self.warming_up or self._averaged:
            return
        asked = []
        for unit in self.units:
            gradient = unit.gradient()
            finite = self.shards.sum((~gradient.isfinite()).sum()) == 0
            asked.append(self.exchange.average(f"warmup/{self.steps}/{unit.name}", gradient, finite.float()))
        for unit, pending in zip(self.units, asked, strict=True):
            unit.set_gradient(self.wait(pending, needed=self.position + 1))
        self._averaged = True

    def begin(self, round: Round, *, leaving: bool = False) -> Flight:
        """Open `round` and return at once; its units land as the next forward passes reach them."""
        units = self._fragment(round.id)
        for flight in list(self._flights):
            if self.config.landing == "forward" or set(units) & set(flight.units):
                self._finish(flight)
            else:  # one order of messages on all nodes: this round's behind the older ones'
                self._send_all(flight)
        if self.config.landing == "arrival":
            for i in units:
                self.units[i].sent = self.units[i].flat()
        opening = self.exchange.open(round, units, leaving=leaving)
        flight = Flight(round, units, opening, deque(units), self.local_steps)
        self._flights.append(flight)
        if self.free:
            self._send_all(flight)
        return flight

    def finish(self) -> None:
        """Land everything that is under way, waiting for it. A checkpoint never sees half a round."""
        for flight in list(self._flights):
            self._finish(flight)

    def abandon(self) -> list[Round]:
        """Forget rounds that not every node has opened, to leave without waiting for the others.

        Returns them; `begin` them again after a resume. With an asynchronous exchange, forget all: what
        was handed to the agent is its affair.
        """
        unopened = [flight for flight in self._flights if self.free or flight.verdict is None]
        for flight in reversed(unopened):
            self.exchange.abandon()
            self._flights.remove(flight)
            for i in flight.units:
                self.units[i].sent = None
        return [flight.round for flight in unopened if flight.verdict is None]

    def close(self) -> None:
        """Exchange what the last, shorter interval has learned, and leave: together with the other nodes,
        unless the exchange is asynchronous.

        A node that ends early keeps answering rounds, with weight 0, until all have ended.
        """
        self.finish()
        if self.warming_up or not self.anchored:
            return
        all_leaving = 0
        while all_leaving < self.config.fragments:  # every fragment once more
            round = Round(self.schedule.last_id + 1, self.local_steps - self.schedule.last_step)
            self.schedule.last_id, self.schedule.last_step = round.id, self.local_steps
            flight = self.begin(round, leaving=True)
            self._finish(flight)
            assert flight.verdict is not None
            all_leaving = all_leaving + 1 if flight.verdict.all_leaving else 0
        self.exchange.leave()

    # -- rounds

    def compare(self) -> None:
        """Raise ValueError if model or settings differ between nodes. All nodes together, before anything
        else is exchanged; only the first call does it. `with` does it by itself."""
        if self._compared:
            return
        settings = {f"edit.{name}": str(getattr(self.config, name)) for name in ("fragments", "warmup_steps")}
        schedule = described("schedule", self.schedule)
        settings |= {name: text for name, text in schedule.items() if name not in _PROGRESS}
        self.exchange.compare(settings)
        self._compared = True

    def anchor(self) -> None:
        """Take the first anchors, all nodes together. `with` and the end of the warm-up do it by
        themselves."""
        self.compare()
        self.exchange.anchor()
        self.anchored = True

    def _due(self) -> Round | None:
        """Decided by the node's first rank, so that all its ranks open the round after the same step."""
        if self.free and self._under_way(self._fragment(self.schedule.last_id + 1)):
            return None  # put off: the schedule is asked again, and finds its last round longer ago
        round = self.schedule.due(self.local_steps) if self.shards.leads else None
        id, steps = self.shards.decide([round.id, round.steps] if round else [0, 0])
        if not id:
            return None
        self.schedule.last_id, self.schedule.last_step = id, self.local_steps
        return Round(id, steps)

    def _under_way(self, units: Sequence[int]) -> bool:
        """Whether any of `units` has been sent and not answered."""
        return any(i in flight.sent and i not in flight.ready for flight in self._flights for i in units)

    def _hold_back(self) -> None:
        """Wait for answers that this node has gone on without for too long."""
        for flight in list(self._flights) if self.free else ():
            if self.local_steps - flight.opened_at >= self.exchange.max_steps_ahead:
                self._finish(flight)

    def _fragment(self, round_id: int) -> tuple[int, ...]:
        """Every P-th unit: a fragment is spread over the depth (Streaming DiLoCo, arXiv:2501.18512)."""
        P = self.config.fragments
        return tuple(range((round_id - 1) % P, len(self.units), P))

    def _look_for_answers(self) -> None:
        """`arrival`: note what has come, as all ranks of the node see it. Never waits for another node."""
        if self.config.landing == "forward" or not self._flights:
            return
        asked = [(flight, i) for flight in self._flights for i in flight.sent if i not in flight.ready]
        opening = [flight for flight in self._flights if flight.verdict is None]
        here = [flight.sent[i].done() for flight, i in asked] + [flight.opening.done() for flight in opening]
        agreed = iter(self.shards.all(here))
        for flight, i in asked:
            if next(agreed):
                flight.ready.add(i)
        for flight in opening:
            if next(agreed):
                self._send_all(flight)

    def _send_all(self, flight: Flight) -> None:
        self._verdict(flight)
        while flight.unsent:
            self._send(flight)

    def _send(self, flight: Flight) -> None:
        i = flight.unsent.popleft()
        flight.sent[i] = self.exchange.start(i)

    def _verdict(self, flight: Flight) -> Verdict:
        if flight.verdict is None:
            flight.verdict = self.wait(flight.opening, flight, needed=self.position)
            self.total_steps = flight.verdict.total_steps
        return flight.verdict

    # -- landing

    def _before_forward(self, i: int) -> None:
        for flight in list(self._flights):
            if i in flight.units and (self.config.landing == "forward" or i in flight.ready):
                self._land(flight, i)

    def _after_forward(self) -> None:
        """Units whose module did not run in this pass land here, before the backward pass."""
        if self.config.landing == "forward":
            self.finish()

    def _finish(self, flight: Flight) -> None:
        for i in flight.units:
            self._land(flight, i)

    def _land(self, flight: Flight, i: int) -> None:
        """Idempotent: a recomputed or repeated forward finds nothing left to do."""
        verdict = self._verdict(flight)
        place = flight.units.index(i)
        while flight.unsent and flight.units.index(flight.unsent[0]) <= place + self.config.prefetch:
            self._send(flight)
        if i not in flight.sent:
            return
        anchor = self._answer(flight, i)
        verdict = flight.verdict = self.exchange.conclude(i, verdict)
        with torch.inference_mode(False), torch.no_grad():
            self._take(self.units[i], anchor, adopt=i in verdict.distrusted)
        flight.ready.discard(i)
        if not flight.sent and not flight.unsent:
            self._flights.remove(flight)
            self.round_id = flight.round.id
            self.on_round(verdict, flight.waited_s)

    def _answer(self, flight: Flight, i: int) -> Tensor:
        """Unit `i`'s next anchor, waited for if it must be. A wait that is broken off leaves it under way."""
        if i in flight.ready:
            anchor = flight.sent[i].result()
        elif self.free:
            name = f"the hub's answer for unit {self.units[i].name} of round {flight.round.id}"
            anchor = self.wait_together(flight.sent[i], name, flight=flight, position=self.position)
        else:
            anchor = self.wait(flight.sent[i], flight)
        del flight.sent[i]
        return anchor

    def _take(self, unit: SyncUnit, anchor: Tensor, *, adopt: bool) -> None:
        if unit.sent is None or adopt:
            unit.adopt(anchor)
        else:
            unit.follow(anchor)
        unit.sent = None
        for module in unit.modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the root gathered, with the old values
        if adopt:  # what was learned on the way to an unbelievable place must not steer the next steps
            for p in unit.params:
                for moment in self.inner.state.get(p, {}).values():
                    if isinstance(moment, Tensor):
                        moment.zero_()
        if anchor.is_cuda and self.shards.group is not None:
            # FSDP2 gathers on a stream that waited for this one at the root's forward, not for this copy.
            torch.cuda.current_stream().synchronize()


def _hook(act: Callable[[], None]) -> Callable[..., None]:
    """`act` as a hook, opaque to torch.compile: what lands must not become part of a graph."""
    hook: Callable[..., None] = torch.compiler.disable(lambda *_: act())  # type: ignore[no-untyped-call]
    return hook
