"""`LayerSync`: layer-wise local SGD in a training loop, hidden behind the forward pass.

A node trains on its own between rounds (EDiT, arXiv:2412.07210, figure 1). `LayerSync` counts the inner
steps, opens a round when the schedule says so, and attaches the hooks through which `OpenRounds` lands its
units.

With an asynchronous exchange a round is put off while one of its units is under way; the progress keeps
growing and travels in the next push. It leaves out units whose answers take more than two intervals. A node
that is `max_steps_ahead` steps ahead of an answer waits for it.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from aedit.edit import snapshot
from aedit.edit.agreement import described_loop, equalize
from aedit.edit.buffers import ModelBuffers
from aedit.edit.config import EditConfig
from aedit.edit.engine_weights import EngineWeights, PolicyEngine
from aedit.edit.exchange import Exchange, RoundOutcome, check_new, mark_taken
from aedit.edit.hooks import attach_hooks
from aedit.edit.optimizers import Inner, InnerOptimizers
from aedit.edit.rounds import OpenRound, OpenRounds
from aedit.edit.schedule import RoundSchedule, make_schedule
from aedit.edit.shards import local, reshard, shards_of
from aedit.edit.units import SyncUnit, find_units, fragment
from aedit.edit.waiting import Waiter
from aedit.edit.warmup import GradientMean
from aedit.types import Round, checked
from aedit.weights import refuse_meta_default

_NEW_EXCHANGE = (
    "make a new one for each LayerSync (several MeanExchange may share a transport; a node of a hub calls "
    "HubExchange.join again)"
)

_SHARED = (
    "parameter {name} is in another `with sync:` block, which is not over: leave that first, or train models "
    "that share parameters with one LayerSync, as an nn.ModuleDict"
)

_BY_TIME = (
    "{kind} cannot be used in two `with sync:` blocks at once: nodes open rounds at steps of their own, so a "
    "node could wait in the first block for one that waits for it in the second. Train both models with one "
    "LayerSync, as an nn.ModuleDict with a list of optimizers, or use EverySteps in both"
)

_ACTIVE: list[tuple[int, "weakref.ref[LayerSync]"]] = []
"""Threads and blocks that were entered and are not over; one that was abandoned goes with its model."""
"""The `with sync:` blocks that this process is in, by their thread."""


@checked()
class LayerSync(Waiter):
    """Attach local SGD to a model by hooks, which `with` adds and removes. Make one with `LayerSync.of`."""

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        exchange: Exchange,
        schedule: RoundSchedule,
        config: EditConfig,
        weight_states: Sequence[str] | None = None,
    ) -> None:
        refuse_meta_default()
        _check_values(model)
        check_new(exchange, _NEW_EXCHANGE)
        check_new(schedule, f"make a new {type(schedule).__name__} for each LayerSync")
        reshard(model.modules())
        super().__init__(shards_of(list(model.parameters())), config.timeout_s)
        self.model = model
        self.optimizers = InnerOptimizers(inner, model, self.shards, weight_states)
        self.exchange, self.schedule, self.config = exchange, schedule, config
        self.free = exchange.asynchronous
        if self.free and config.warmup_steps:
            raise ValueError(
                f"edit.warmup_steps = {config.warmup_steps!r} must be 0 with a hub: its nodes do not "
                "average gradients"
            )
        of_model = find_units(model, config.units)
        self.units: Sequence[SyncUnit] = [*of_model, *exchange.apart]
        if config.fragments > (most := len(self.units)):
            raise ValueError(
                f"edit.fragments = {config.fragments} is more than the model's {most} units: lower it"
            )
        self.on_open: Callable[[RoundOutcome], None] = lambda outcome: None
        """Called when a round is opened, before a hub is sent its units; see `RoundOutcome`."""
        self.on_round: Callable[[RoundOutcome, float], None] = lambda outcome, waited_s: None
        self.steps = 0
        """Inner steps so far, warm-up included."""
        self.round_id = 0
        """Highest number of a round that has landed."""
        self.total_steps = 0
        """Inner steps of all nodes up to that round, warm-up not included."""
        self._hooks: list[RemovableHandle] = []
        for unit in self.units:
            unit.states = self.optimizers
        self._params = [p for unit in self.units for p in unit.params]
        self._compared, self._resumed_at = False, 0
        self.anchored = False
        """True once the first local phase has begun."""
        self._gradients = GradientMean(of_model, self.shards, exchange, self)
        self._buffers = ModelBuffers(model, exchange, self.shards, local(self.units[0].params[0]).device)
        self._rounds = OpenRounds(self, self._buffers)
        self._engine_weights = EngineWeights(model, self.shards)
        exchange.bind(self.units, self.shards)
        schedule.listen(exchange.notes)
        mark_taken(exchange, schedule)

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
        """Make `model` one node of a run and return its `LayerSync`.

        Args:
            model: Any module. If the node has several ranks, shard it with `fully_shard` first.
            inner: The optimizer of the model, or a list of all its optimizers.
            exchange: The source of new anchors, such as `MeanExchange(TorchTransport())`.
            schedule: Decides when a round is due. None: the schedule of the hub that was joined, else the
                one that `config` describes.
            config: All other settings. None: those of the hub that was joined, else `EditConfig()`.
            weight_states: Keys of optimizer state that hold weights, such as fp32 copies or the `z` of
                schedule-free optimizers; they move with the parameters. None: recognise them by their values.

        Raises:
            ValueError: An optimizer or a setting does not fit the model or the exchange; the message says how
                to mend it.

        Example:
            sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySeconds(600))
            with sync:
                for batch in loader:
                    loss(model, batch).backward(); inner.step(); inner.zero_grad()
                    sync.step()
        """
        schedule, config = chosen_settings(exchange, schedule, config)
        return cls(model, inner, exchange, schedule, config, weight_states)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LayerSync cannot be copied or pickled, as its exchange has connections: copy the model, and"
            " save state_dict()"
        )

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Return the inner optimizer.

        Raises:
            ValueError: There are several; `optimizers.outermost` lists them.
        """
        return self.optimizers.single()

    def state_dict(self) -> dict[str, Tensor]:
        """Return anchors, outer state, norms and counters by name.

        Save them together with the model and the inner optimizers: nothing else must outlive the process.
        `torch.distributed.checkpoint` accepts a `LayerSync` as it is. The tensors are views: save them before
        the next step.

        Raises:
            ValueError: A round is under way and the exchange has no hub; call `finish` first.
        """
        return snapshot.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; restore the model and the inner optimizers as well.

        Without a hub, all nodes must resume from the same round. With a hub, each node resumes on its own and
        takes the newest anchors of the hub when it joins.

        Raises:
            ValueError: Called inside `with`, or names or shapes differ.
        """
        if self._hooks:
            raise ValueError("sync.load_state_dict() must be called before `with sync:`")
        snapshot.load_state_dict(self, state)
        self._resumed_at = self.position

    # -- attach and detach

    def __enter__(self) -> "LayerSync":
        refuse_meta_default()
        if self._conflict():
            gc.collect()  # a block may be one of a trainer that has failed, whose model is in no use any more
            if conflict := self._conflict():
                raise ValueError(conflict)
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
        self._buffers.begin()
        self._rounds.hooked = self._buffers.holders if self.config.landing == "forward" else []
        before = [
            (unit.modules, partial(self._rounds.before_forward, i)) for i, unit in enumerate(self.units)
        ]
        before.append((self._rounds.hooked, partial(self._rounds.before_buffers)))
        before.append(([self.model], partial(self._rounds.own_values.new_pass)))  # last: hooks are prepended
        self._hooks = attach_hooks(self.model, before, self._rounds.after_forward)
        self._rounds.note_parameters()
        self.optimizers.watch(self._rounds.own_values.look, self._rounds.own_values.take)
        _ACTIVE.append((threading.get_ident(), weakref.ref(self)))
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
            self.optimizers.unwatch()
            self._compared = False
            _ACTIVE[:] = [(thread, ref) for thread, ref in _ACTIVE if ref() not in (None, self)]

    def _conflict(self) -> str:
        """Return why this block cannot be entered beside those that are not over; "" if it can."""
        for thread, ref in list(_ACTIVE):
            other = ref()
            if other is None:
                continue
            theirs = {id(p) for p in other._params}
            for unit in self.units:
                for name, p in zip(unit.names, unit.params, strict=True):
                    if id(p) in theirs:
                        return _SHARED.format(name=name)
            by_time = [sync for sync in (other, self) if getattr(sync.schedule, "by_time", False)]
            if thread == threading.get_ident() and by_time and not (self.free or other.free):
                return _BY_TIME.format(kind=type(by_time[0].schedule).__name__)
        return ""

    # -- what the training loop calls

    @property
    def warming_up(self) -> bool:
        """Return whether gradients are averaged at every step, as before the first local phase."""
        return self.config.warmup_steps == "all" or self.steps < self.config.warmup_steps

    @property
    def in_flight(self) -> bool:
        """Return whether a round has been opened and has not landed completely."""
        return bool(self._rounds)

    @property
    def local_steps(self) -> int:
        """Return the number of inner steps since the warm-up."""
        return 0 if self.warming_up else self.steps - int(self.config.warmup_steps)

    @property
    def position(self) -> int:
        """Return the number of warm-up steps and rounds that this node has reached."""
        return self.steps - self.local_steps + self.schedule.last_id

    def step(self) -> None:
        """Count an inner step, and open a round if one is due. Call it after the inner optimizer has stepped.

        Raises:
            ValueError: Called outside `with`, or parameters or optimizers are others than those of `of`, or
                other parameters are frozen, or parameters were cast, or adapters are merged.
            RuntimeError: The gradients of a step of the warm-up were not averaged, what has landed was
                overwritten with older values, or an exception has cut an exchange short.
        """
        if not self._hooks:
            raise ValueError("sync.step() outside the block: wrap the training loop in `with sync:`")
        refuse_meta_default()
        self._rounds.check_whole()
        self.optimizers.check_unchanged()
        if self.optimizers.idle:
            return
        self.optimizers.check_frozen()
        self.optimizers.look_early(self._params)
        warmed_up = self.warming_up
        if warmed_up:
            self._gradients.end_step()
        self._rounds.end_step()
        self.steps += 1
        self.exchange.note_step(self.steps, self.waited_s)
        if warmed_up and not self.warming_up:
            with self._rounds.whole("the end of the warm-up", waits=True):
                self._gradients.detach()
                self._buffers.exchange(f"warmup/{self.steps}", self.wait)
                self.anchor()
        elif not warmed_up:
            self._rounds.note_answers()
            self._rounds.hold_back()
            self._rounds.land_in_step()
            units = self._rounds.movable(self._fragment(self.schedule.last_id + 1))
            before = self.schedule.last_id, self.schedule.last_step
            if round := self._due() if units else None:
                try:
                    self._rounds.make_room(units)
                except BaseException:  # an interrupted wait: the round is still due
                    self.schedule.last_id, self.schedule.last_step = before
                    raise
                self._rounds.open_in_step(round, units)
        self._rounds.note_parameters()

    def average_gradients(self) -> None:
        """Replace the gradients by their mean over the nodes, during the warm-up.

        The inner step does this by itself. Call it earlier to clip the mean instead of each node's gradient,
        and before a GradScaler checks the gradients. A node whose gradient of a unit has a NaN or Inf is left
        out of the mean of that unit.
        """
        self._rounds.check_whole()
        if self.warming_up:
            self._gradients.average()

    def begin(self, round: Round, *, leaving: bool = False) -> OpenRound:
        """Open `round` and return it at once; its units land in the next forward passes."""
        opened = self._rounds.open(round, self._fragment(round.id), leaving=leaving)
        self._rounds.note_parameters()
        return opened

    def land(self) -> int:
        """Land the units whose answers are here and return how many; never wait for another node.

        Units land in the next forward pass by themselves. Call this between two training steps, after
        `step`, when the weights are used before that, and `update_engine` to generate with them. During the
        warm-up nothing is under way. All ranks of the node call it together.

        Raises:
            ValueError: Called outside `with`, or with other values in place of the parameters.
        """
        if not self._hooks:
            raise ValueError("sync.land() outside the block: wrap the training loop in `with sync:`")
        if self.in_flight:
            self.optimizers.check_forms()
        return self._rounds.land()

    def update_engine(self, engine: PolicyEngine | None, policy: nn.Module | None = None) -> int:
        """Land what is here, hand the weights to `engine`, and return their policy version.

        The next training forward then computes with the weights that the engine generates with: nothing lands
        in between. (With `landing = "forward"` that pass would wait for all units, so this call does.)
        An engine of the same parameters shares them; others get copies, of sharded parameters gathered one at
        a time. All ranks of the node call it together, between two training steps, after `step`.

        Args:
            engine: The engine of this rank; None on a rank of the node that has none.
            policy: The part of the model that the engine runs; None: all of it.

        Returns:
            A number that grows whenever weights have changed since the last call, by inner steps too. Two
            sets of weights never have the same one.

        Raises:
            ValueError: The weights do not fit the engine, or other values are in place of the parameters.
            RuntimeError: A rank was lost on the way; the engine does not generate until an update succeeds.

        Example:
            version = sync.update_engine(engine)
            rollouts = list(engine.generate(prompts))
        """
        if self._hooks:
            self.finish() if self.config.landing == "forward" else self.land()
        trained = self.model if policy is None else policy
        return self._engine_weights.update(engine, getattr(trained, "_orig_mod", trained), self.steps)

    def finish(self) -> None:
        """Wait for everything that is under way and land it. Call it before a checkpoint or an evaluation.

        Raises:
            ValueError: Parameters were cast or moved, or adapters are merged into the weights.
        """
        if self.in_flight:
            self.optimizers.check_forms()
        self._rounds.finish()

    def abandon(self) -> list[Round]:
        """Forget the rounds that not every node has opened, to leave without a wait for the others.

        Returns them: `begin` them again after a resume. With an asynchronous exchange all rounds are
        forgotten, and the agent delivers what it was given.
        """
        return self._rounds.abandon()

    def close(self) -> None:
        """Exchange the progress of the last, shorter interval and leave.

        Without a hub all nodes leave together: a node that ends early answers rounds with weight 0 until all
        have ended.

        Raises:
            ValueError: Parameters or optimizers are others than those of `of`.
        """
        try:
            self.optimizers.check_unchanged()
            self._leave()
        except BaseException:
            self.exchange.withdraw()
            raise

    def _leave(self) -> None:
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
            opened = self.begin(round, leaving=True)
            self.finish()
            assert opened.outcome is not None
            all_leaving = all_leaving + 1 if opened.outcome.all_leaving else 0
        self.exchange.leave()

    # -- rounds

    def whole_step(self) -> AbstractContextManager[None]:
        """Return the block that averages the gradients of a step of the warm-up."""
        self._rounds.check_whole()
        return self._rounds.whole(f"the mean of the gradients of step {self.steps + 1}", waits=True)

    def compare(self) -> None:
        """Compare model and settings with those of the other nodes; only the first call does anything.

        `with` calls it. All nodes call it together, before anything else is exchanged.

        Raises:
            ValueError: Model or settings differ; the message names the first difference.
        """
        if not self._compared:
            self.exchange.compare(described_loop(self.model, self.config, self.schedule))
            self._compared = True

    def anchor(self) -> None:
        """Take the first anchors. `with` and the end of the warm-up call it; all nodes call it together."""
        self.compare()
        self.optimizers.look(self._params)
        self.exchange.anchor()
        self.anchored = True

    def _due(self) -> Round | None:
        """Return the round that is due, or None.

        The first rank of the node decides, so that all its ranks open the round after the same step.
        """
        round = self.schedule.due(self.local_steps) if self.shards.leads else None
        id, steps = self.shards.decide([round.id, round.steps] if round else [0, 0])
        if not id:
            return None
        self.schedule.last_id, self.schedule.last_step = id, self.local_steps
        return Round(id, steps)

    def _fragment(self, round_id: int) -> tuple[int, ...]:
        return fragment(round_id, self.config.fragments, len(self.units))


def _check_values(model: nn.Module) -> None:
    """Raise ValueError if a parameter has no values yet."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(f"parameter {name} has no shape yet: run a batch through the model first")
        if p.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device, without values: call model.to_empty(device=...) and"
                " load its weights first"
            )


def chosen_settings(
    exchange: Exchange, schedule: RoundSchedule | None, config: EditConfig | None
) -> tuple[RoundSchedule, EditConfig]:
    """Return schedule and configuration of a node: its own, else the exchange's, else the default ones.

    Raises ValueError for settings in `config` that belong to the exchange, and for an exchange that is none.
    """
    if isinstance(exchange, type) or not hasattr(exchange, "defaults"):
        found = getattr(exchange, "__qualname__", None) or type(exchange).__qualname__
        raise ValueError(
            f"exchange must be an Exchange, such as MeanExchange(TorchTransport()), got {found}"
            f"{' itself: call it' if isinstance(exchange, type) else ''}"
        )
    if defaults := exchange.defaults():
        config, schedule = config or defaults[0], schedule or defaults[1]
    config = config or EditConfig()
    for name in ("penalty", "offload"):
        if getattr(config, name) not in (getattr(EditConfig(), name), getattr(exchange, name, None)):
            raise ValueError(f"config.{name} has no effect here: give it to the exchange")
    return schedule or make_schedule(config), config
