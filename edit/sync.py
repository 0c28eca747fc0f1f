"""When a unit lands: layer-wise synchronisation, hidden behind the forward pass.

`forward` landing (EDiT, arXiv:2412.07210, figure 1): each unit's forward pre-hook starts the exchange of the
units up to `prefetch` places ahead, waits for its own, and lets the module run on the new anchor. `arrival`
landing: nothing waits; when an answer is here, the next forward adds `anchor - sent` to the parameters. With
an asynchronous exchange a round is put off while one of its units is under way, and its progress goes on
growing; a node that would be too many steps ahead of an answer waits for it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aedit.edit import snapshot
from aedit.edit.agreement import described_loop
from aedit.edit.buffers import Buffers
from aedit.edit.config import EditConfig
from aedit.edit.defaults import chosen
from aedit.edit.equal import equalize
from aedit.edit.exchange import Exchange, RoundOutcome
from aedit.edit.flight import Flight, note_answers, under_way
from aedit.edit.hooks import attach
from aedit.edit.landing import StandIns, reshard, take, values_only, warn_of_idle_modules
from aedit.edit.optimizers import Inner, InnerOptimizers
from aedit.edit.schedule import RoundSchedule
from aedit.edit.shards import local, shards_of
from aedit.edit.units import SyncUnit, find_units, fragment
from aedit.edit.waiting import Waiter
from aedit.edit.warmup import GradientMean
from aedit.types import Round


class LayerSync(Waiter):
    """Attach EDiT to a model by hooks; `with` enters and leaves. See `LayerSync.of`."""

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        exchange: Exchange,
        schedule: RoundSchedule,
        config: EditConfig,
        weight_states: Sequence[str] | None = None,
    ) -> None:
        reshard(model.modules())
        super().__init__(shards_of(list(model.parameters())), config.timeout_s)
        self.model = model
        self.optimizers = InnerOptimizers(inner, model, self.shards, weight_states)
        self.exchange, self.schedule, self.config = exchange, schedule, config
        self.free = exchange.asynchronous
        if self.free and config.warmup_steps:
            raise ValueError("edit.warmup_steps must be 0 with a hub: its nodes do not meet at every step")
        self.units: Sequence[SyncUnit] = find_units(model, config.units)
        if config.fragments > (most := len(self.units)):
            raise ValueError(f"edit.fragments = {config.fragments} is more than the model's {most} units")
        self.on_round: Callable[[RoundOutcome, float], None] = lambda verdict, waited_s: None
        self.steps = 0
        """Inner steps so far, warm-up included."""
        self.round_id = 0
        """The round landed last."""
        self.total_steps = 0
        """Inner steps of all nodes up to that round, warm-up not included."""
        self._flights: list[Flight] = []  # oldest first
        self._hooks: list[RemovableHandle] = []
        for unit in self.units:
            unit.states = self.optimizers
        self._params = [p for unit in self.units for p in unit.params]
        self._compared, self._resumed_at = False, 0
        self.anchored = False
        """Whether the first local phase has begun."""
        self._stand_ins = StandIns(self.units, self.shards)
        self._gradients = GradientMean(self.units, self.shards, exchange, self)
        self._buffers = Buffers(model, exchange, self.shards, local(self.units[0].params[0]).device)
        exchange.bind(self.units, self.shards)
        schedule.listen(exchange.notes)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inner: Inner,
        *,
        exchange: Exchange,
        schedule: RoundSchedule | None = None,
        config: EditConfig | None = None,
        weight_states: Sequence[str] | None = None,
    ) -> "LayerSync":
        """Make `model` one node of a run.

        model: any module; shard it with `fully_shard` first if the node has several ranks.
        inner: its optimizer, or a list of all of them.
        exchange: where new anchors come from, such as `MeanExchange(TorchTransport())`.
        schedule: when. config: everything else. By default what a joined hub says, else `EditConfig()`.
        weight_states: keys of optimizer state that hold weights (fp32 copies, the `z` of schedule-free
        optimizers), which move with the parameters; by default they are recognised by their values.

            sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySeconds(600))
            with sync:
                for batch in loader:
                    loss(model, batch).backward(); inner.step(); inner.zero_grad()
                    sync.step()
        """
        schedule, config = chosen(exchange, schedule, config)
        return cls(model, inner, exchange, schedule, config, weight_states)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The inner optimizer. Raises ValueError if there are several: see `optimizers.outermost`."""
        return self.optimizers.single()

    def state_dict(self) -> dict[str, Tensor]:
        """Return anchors, outer state, norms and counters by name: all that must outlive the process besides
        model and inner optimizers. `torch.distributed.checkpoint` takes a `LayerSync` as it is. Views: save
        before the next step. Raises ValueError while a round is under way without a hub: `finish` first."""
        return snapshot.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, all nodes at one round; load model and inner optimizers too. With a
        hub each node is on its own, and takes the hub's newest anchors. Raises ValueError inside `with`,
        and if names or shapes differ."""
        if self._hooks:
            raise ValueError("sync.load_state_dict() must be called before `with sync:`")
        snapshot.load_state_dict(self, state)
        self._resumed_at = self.position

    # -- attach and detach

    def __enter__(self) -> "LayerSync":
        self.compare()
        snapshot.check_same_round(self.exchange, self._resumed_at)
        reshard(self.model.modules())
        self.optimizers.look(self._params)
        if not self.anchored and (changed := equalize(self.model, self.exchange)):
            self.optimizers.replaced([p for unit in self.units for p in unit.named(changed)])
        if self.warming_up:
            self._gradients.attach(self.optimizers.stepping)
        elif not self.anchored:
            self.anchor()
        holders = self._buffers.holders if self.config.landing == "forward" else []
        before = [(unit.modules, partial(self._before_forward, i)) for i, unit in enumerate(self.units)]
        self._hooks = attach(self.model, [*before, (holders, self._before_buffers)], self._after_forward)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.close()
            else:
                self.exchange.withdraw()
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._gradients.detach()
            self._compared = False

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
        stepped.

        Raises RuntimeError for a step of the warm-up whose gradients were not averaged.
        """
        if not self._hooks:
            raise ValueError("sync.step() outside the block: wrap the training loop in `with sync:`")
        self.optimizers.check_unchanged()
        if self.optimizers.idle:
            return
        self.optimizers.look_early(self._params)
        warmed_up = self.warming_up
        if warmed_up:
            self._gradients.end_step()
        self.steps += 1
        self.exchange.note_step(self.steps, self.waited_s)
        if self.warming_up:
            return
        if warmed_up:
            self._gradients.detach()
            self._buffers.exchange(f"warmup/{self.steps}", self.wait)
            return self.anchor()
        if self.config.landing == "arrival":
            for flight in note_answers(self._flights, self.shards, self.local_steps):
                self._send_all(flight)
            for flight in list(self._flights):
                self._conclude(flight)
        self._hold_back()
        if round := self._due():
            self.begin(round)
        if self.config.landing == "forward" or any(flight.ready for flight in self._flights):
            self._stand_ins.note_parameters()

    def average_gradients(self) -> None:
        """Warm-up: replace gradients by their mean over nodes. Called before the inner step by itself;
        call it before clipping gradients, so that what is clipped is the mean, and before a GradScaler looks
        at them. A node with a NaN or Inf is left out of a unit."""
        if self.warming_up:
            self._gradients.average()

    def begin(self, round: Round, *, leaving: bool = False) -> Flight:
        """Open `round` and return at once; its units land as the next forward passes reach them."""
        units = fragment(round.id, self.config.fragments, len(self.units))
        warn_of_idle_modules(self._flights, self.units, self.config.landing, self.local_steps)
        for flight in list(self._flights):
            if self.config.landing == "forward" or set(units) & set(flight.units):
                self._finish(flight)
            else:  # one order of messages on all nodes: this round's behind the older ones'
                self._send_all(flight)
        self.optimizers.look(self._params)
        if self.config.landing == "arrival":
            for i in units:
                self.units[i].sent = self.units[i].flat()
        opening = self.exchange.open(round, units, leaving=leaving)
        flight = Flight(round, units, opening, deque(units), self.local_steps, self.optimizers.modes)
        if self.free:
            self._buffers.warn_if_changed()
        elif self._buffers:
            flight.buffers = self._buffers.open(str(round.id), stepped=round.steps > 0)
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
        if self.warming_up:
            self._gradients.leave()
            return self._buffers.exchange(f"warmup/{self.steps}", self.wait)
        if not self.anchored:
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

    def compare(self) -> None:
        """Raise ValueError if model or settings differ between nodes. All nodes together, before anything
        else is exchanged; only the first call does it. `with` does it by itself."""
        if not self._compared:
            self.exchange.compare(described_loop(self.model, self.config, self.schedule))
            self._compared = True

    def anchor(self) -> None:
        """Take the first anchors, all nodes together. `with` and the end of the warm-up do it by
        themselves."""
        self.compare()
        self.optimizers.look(self._params)
        self.exchange.anchor()
        self.anchored = True

    def _due(self) -> Round | None:
        """Decided by the node's first rank, so that all its ranks open the round after the same step."""
        units = fragment(self.schedule.last_id + 1, self.config.fragments, len(self.units))
        if self.free and under_way(self._flights, units):
            return None  # put off: the schedule is asked again, and finds its last round longer ago
        round = self.schedule.due(self.local_steps) if self.shards.leads else None
        id, steps = self.shards.decide([round.id, round.steps] if round else [0, 0])
        if not id:
            return None
        self.schedule.last_id, self.schedule.last_step = id, self.local_steps
        return Round(id, steps)

    def _hold_back(self) -> None:
        """Wait for answers that this node has gone on without for too long."""
        for flight in list(self._flights) if self.free else ():
            if self.local_steps - flight.opened_at >= self.exchange.max_steps_ahead:
                self._finish(flight)

    def _send_all(self, flight: Flight) -> None:
        self._verdict(flight)
        while flight.unsent:
            flight.send(self.exchange)

    def _verdict(self, flight: Flight) -> RoundOutcome:
        if flight.verdict is None:
            flight.verdict = self.wait(flight.opening, flight, needed=self.position)
            self.total_steps = flight.verdict.total_steps
            if flight.buffers:
                rows = self.wait(flight.buffers.rows, flight)
                flight.buffers.send(rows, trusted=flight.verdict.trusts_node)
        return flight.verdict

    # -- landing

    def _before_forward(self, i: int) -> None:
        for flight in list(self._flights):
            due = flight.late if self.config.landing == "forward" else flight.ready
            if i in due and not self._stand_ins.run([i]):
                self._land(flight, i)

    def _after_forward(self) -> None:
        """Units whose module did not run in this pass land here, before the backward pass."""
        for flight in list(self._flights) if self.config.landing == "forward" else ():
            if not self._stand_ins.run(flight.late):
                self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        for i in flight.units:
            self._land(flight, i)
        self._land_buffers(flight)

    def _before_buffers(self) -> None:
        """`forward`: autograd saves buffers, so all land before the first module that has any runs."""
        for flight in list(self._flights):
            if not self._stand_ins.run(flight.late):
                self._land_buffers(flight)

    @values_only
    def _land_buffers(self, flight: Flight) -> None:
        if flight.buffers and not flight.buffers.landed:
            self._verdict(flight)
            flight.buffers.land(partial(self.wait, flight=flight))
            self._conclude(flight)

    @values_only
    def _land(self, flight: Flight, i: int) -> None:
        """Idempotent: a recomputed or repeated forward finds nothing left to do."""
        verdict = self._verdict(flight)
        place = flight.units.index(i)
        while flight.unsent and flight.units.index(flight.unsent[0]) <= place + self.config.prefetch:
            flight.send(self.exchange)
        if i not in flight.sent:
            return
        anchor = self._answer(flight, i)
        verdict = flight.verdict = self.exchange.conclude(i, verdict)
        if self.config.landing == "forward":
            self.optimizers.check_modes(flight.modes, flight.round.id)
        take(self.units[i], anchor, self.optimizers, self.shards, adopt=i in verdict.distrusted)
        flight.ready.pop(i, None)
        self._conclude(flight)

    def _conclude(self, flight: Flight) -> None:
        if flight.verdict and flight.landed:
            self._flights.remove(flight)
            self.round_id = flight.round.id
            self.on_round(flight.verdict, flight.waited_s)

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
