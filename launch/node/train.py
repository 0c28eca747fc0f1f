"""Training loop of one node, its measurements, and how it takes part in the rounds of its world."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aedit.edit import LayerSync, RoundOutcome, Shards, snapshot
from aedit.launch.config import RunConfig
from aedit.launch.node.budget import NodeBudget
from aedit.launch.node.checkpoint import Mark, NodeCheckpoints, Resumed, training_state
from aedit.launch.node.objective import Objective, Slowdown, set_lr
from aedit.launch.node.stop import Stop, Stopped
from aedit.launch.node.world import World
from aedit.launch.records import NodeAlerts, PositionLog, Recorder, RLMetric, ranges_of
from aedit.types import Round

if TYPE_CHECKING:
    from aedit.launch.node.build_hub import HubMembership


def train(node: "TrainingNode") -> None:
    """Train until the end of the run's budget or a stop request; then save and leave with the other nodes."""
    with node.in_run():
        while node.goes_on():
            node.stop.check()
            node.accumulate_gradients()
            node.sync.average_gradients()  # during the warm-up only
            node.inner_step()
            node.end_step()
            node.sync.step()  # opens a round if one is due; layers land during the next forward pass
            node.record_step()
            node.evaluate_if_due()
            node.save_after_a_round()


@dataclass(slots=True)
class StepMeter:
    """Measurements of the current step and of the steps since the last line of metrics."""

    grad_norm: Tensor | None = None
    loss: Tensor | None = None
    num_steps: int = 0
    began_at: float | None = None
    """None: no step has begun."""
    waited_before_s: float = 0.0
    stretched_before_s: float = 0.0

    def begin_step(self, waited_s: float, stretched_s: float = 0.0) -> None:
        """Start to measure, before the step draws its samples; do nothing if the step has begun already.

        waited_s: the node's waiting time so far, here and below. stretched_s: its `Slowdown.stretched_s`.
        """
        if self.began_at is None:
            self.began_at, self.waited_before_s = time.monotonic(), waited_s
            self.stretched_before_s = stretched_s

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; it stays on its device, so that nothing waits for it."""
        self.loss = loss if self.loss is None else self.loss + loss

    def slow_down(self, waited_s: float, slowdown: Slowdown) -> None:
        """Sleep until the step has taken `slowdown.factor` times its own duration."""
        if slowdown.factor > 1:
            stretched_s = slowdown.stretched_s - self.stretched_before_s
            time.sleep(max(0.0, self._busy_s(waited_s) - stretched_s) * (slowdown.factor - 1))

    def end_step(self, waited_s: float) -> float:
        """Return the seconds of the step without waiting for other nodes."""
        busy_s = self._busy_s(waited_s)
        self.num_steps, self.began_at = self.num_steps + 1, None
        return busy_s

    def _busy_s(self, waited_s: float) -> float:
        assert self.began_at is not None
        return time.monotonic() - self.began_at - (waited_s - self.waited_before_s)

    def mean_loss(self, shards: Shards) -> float:
        """Return the mean loss since the last line, in nats per token. All ranks of the node together."""
        if self.loss is None or not self.num_steps:
            return float("nan")
        mean = float(shards.sum(self.loss)) / self.num_steps / shards.size
        self.loss, self.num_steps = None, 0
        return mean

    def norm(self) -> float:
        """Return the newest gradient norm before clipping. All ranks of the node together."""
        if self.grad_norm is None:
            return float("nan")
        whole = getattr(self.grad_norm, "full_tensor", None)
        return float(whole() if whole else self.grad_norm)


@dataclass(slots=True, kw_only=True)
class TrainingNode:
    """State and components of one training node, made by `aedit.launch.node.build.build`.

    Its methods are the lines of `train`.
    """

    config: RunConfig
    world: World
    objective: Objective
    sync: LayerSync
    budget: NodeBudget
    stop: Stop
    checkpoints: NodeCheckpoints
    recorder: Recorder
    facts: dict[str, Any]
    positions: PositionLog = field(default_factory=PositionLog)
    """Records of the stream's positions."""
    slowdown: Slowdown = field(default_factory=Slowdown)
    hub: "HubMembership | None" = None
    """Membership in a run with a hub; None: nodes take part in each round, and leave, together."""
    resumed: bool = False
    owed: list[Round] = field(default_factory=list)
    tokens: int = 0
    lr: float = 0.0
    newest_loss: float = float("nan")
    """Mean training loss between the last two lines of metrics."""
    rl: RLMetric | None = None
    """Reinforcement learning in the last line of metrics; None in a run on text."""
    alerts: NodeAlerts | None = None
    """Alerts of the node, on the rank that writes."""
    num_accepted: int = 0
    """Rounds that have landed in this attempt, without those that the hub has refused."""
    saved: Mark = field(default_factory=lambda: Mark(0))
    saves_from_s: float = 0.0
    """Time of the monotonic clock before which a node of a hub writes no checkpoint that is due."""
    evaluated_round: int = 0
    bytes_before: int = 0
    idle_used_before_s: float = 0.0
    """Processor time of idle work in the attempts before this one."""
    meter: StepMeter = field(default_factory=StepMeter)

    # -- before and after

    @contextmanager
    def in_run(self) -> Iterator[None]:
        """Begin, attach the rounds, and finish when the block ends or is left by `Stopped`."""
        self.begin()
        try:
            with self.sync:
                for round in self.owed:  # this node had opened and abandoned them before the checkpoint
                    self.sync.begin(round)
                yield
        except Stopped:
            self.leave_early()
        else:
            self.finish()

    def restore(self, resumed: Resumed) -> None:
        """Restore the counters of a checkpoint; `sync` has been restored already."""
        self.resumed, self.owed, self.tokens = True, resumed.owed, resumed.tokens
        self.saved, self.evaluated_round = resumed.mark, resumed.mark.round
        self.sync.waited_s, self.idle_used_before_s = resumed.waited_s, resumed.idle_used_s
        self.objective.restore(resumed.objective)
        if resumed.cuda_rng and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(torch.tensor(resumed.cuda_rng, dtype=torch.uint8))
        self.recorder.clock.busy_s, self.recorder.clock.other_s = resumed.busy_s, resumed.other_s

    def begin(self) -> None:
        """Install the signal handlers and callbacks; evaluate once in a new run."""
        self.stop.listen()
        self.sync.while_waiting = self.stop.while_waiting
        self.sync.on_open, self.sync.on_round = self.record_open, self.record_round
        if not self.resumed:
            self.evaluate()
        if self.hub is not None:
            self.hub.begin(self)

    def finish(self) -> None:
        """Finish at the end of the budget: record, evaluate and save."""
        self.record_metrics()
        self.evaluate()
        if Mark(self.milestone) != self.saved:
            self.save(Mark(self.milestone))
        self.recorder.event("stop", reason="done", step=self.sync.steps, tokens=self.tokens)
        self.positions.stop(self.sync.steps, "done")

    def leave_early(self) -> None:
        """Finish before the end of the budget: leave the run, and save.

        A node of a world lands the rounds that all nodes have opened, and abandons others, which are opened
        again after a resume. It waits for no node in between, since others may wait for its part of a round
        that all have opened.
        """
        self.objective.undo_step()
        self.stop.announce(self.sync.position)
        owed: list[Round] = []
        reason = "signal"
        if self.hub is not None:
            reason = self.hub.leave_early(self)
        else:
            try:
                self.sync.finish()
            except Stopped:
                owed = self.sync.abandon()
        self.record_metrics()
        here = [mark.sub for mark in self.checkpoints.marks() if mark.round == self.milestone]
        # The next free number of this round's checkpoints, so that no node overwrites one.
        sub = self.stop.greatest("sub", 1 + max(here, default=0))
        self.save(Mark(self.milestone, sub), owed)
        self.objective.finish_evaluation()
        self.recorder.event("stop", reason=reason, step=self.sync.steps, tokens=self.tokens)
        self.positions.stop(self.sync.steps, reason)

    # -- one step

    @property
    def _waited_s(self) -> float:
        """Return the seconds in which other nodes worked and this one did not."""
        return self.sync.waited_s + self.slowdown.waited_s

    def goes_on(self) -> bool:
        """Return whether the budget asks for another step."""
        return self.budget.goes_on()

    def begin_step(self) -> None:
        """Start to measure an inner step; `accumulate_gradients` does so where this was not called."""
        self.meter.begin_step(self._waited_s, self.slowdown.stretched_s)

    def accumulate_gradients(self) -> None:
        """Run the forward and backward passes of the next inner step."""
        self.begin_step()
        self.objective.accumulate_gradients(self.meter.add_loss)

    def inner_step(self) -> None:
        """Clip the gradients, and take an inner optimizer step at the current learning rate."""
        clip = self.config.train.grad_clip
        self.meter.grad_norm = torch.nn.utils.clip_grad_norm_(self.sync.model.parameters(), clip)
        self.lr = self.objective.lr(self.budget.progress(), self.budget.nodes())
        for inner in self.sync.optimizers.outermost:
            set_lr(inner, self.lr)
            inner.step()
            inner.zero_grad()
        self.positions.trained(self.sync.steps + 1, self.objective.positions())
        self.meter.slow_down(self._waited_s, self.slowdown)

    def end_step(self) -> None:
        """Count the step's tokens and samples, before `sync.step` opens a round that pushes them."""
        self.tokens += self.objective.end_step()

    def record_step(self) -> None:
        """Count the time of the step, and write a line of metrics if one is due."""
        self.recorder.clock.busy_s += self.meter.end_step(self._waited_s)
        if self.sync.shards.decide([self.recorder.line_is_due()])[0]:
            self.record_metrics()
        if self.hub is not None:
            self.hub.record_step(self)

    # -- progress

    @property
    def milestone(self) -> int:
        """Return the number of rounds.

        During an endless warm-up, the number of rounds that `edit.every` implies.
        """
        if self.config.edit.warmup_steps == "all":
            return self.sync.steps // int(self.config.edit.every)
        return self.sync.round_id

    @property
    def idle_used_s(self) -> float:
        """Return the processor time of idle work in all attempts, in seconds."""
        return self.idle_used_before_s + self.sync.idle_used_s

    # -- evaluation and checkpoints

    def evaluate_if_due(self) -> None:
        """Evaluate if the objective asks for it now, later in waits if it does so."""
        if self.objective.evaluation_is_due(self.milestone, self.evaluated_round):
            self.evaluate(may_be_later=True)

    def evaluate(self, *, may_be_later: bool = False) -> None:
        """Evaluate on held-out data if this node does so, and record it; the other nodes go on."""
        self.evaluated_round = self.milestone
        began = time.monotonic()
        self.objective.finish_evaluation()
        found = None
        if self.budget.evaluates() and not (
            may_be_later and self.objective.evaluate_later(self.sync.steps, self.milestone)
        ):
            found = self.objective.evaluate()
        self.recorder.clock.other_s += time.monotonic() - began
        if found is not None:
            event, values = found
            self.recorder.event(event, step=self.sync.steps, round=self.milestone, **values)

    def save_after_a_round(self) -> None:
        """Save if `checkpoint.every` rounds have passed, at a step boundary with nothing in flight.

        If there is no such boundary for a whole round, land first. A node of a hub does not wait for one: its
        agent holds what is in flight. It saves later if its checkpoints took more than their share of the
        time: the hub has the anchors, and no other node needs a checkpoint of the same round.
        """
        every, behind = self.config.checkpoint.every, self.milestone - self.saved.round
        if not every or behind < every:
            return
        if self.hub is not None and self.sync.shards.decide([time.monotonic() < self.saves_from_s])[0]:
            return
        if self.sync.in_flight and behind > every and not self.sync.free:
            self.sync.finish()
        if not self.sync.in_flight or self.sync.free:
            self.save(Mark(self.milestone))

    def save(self, mark: Mark, owed: list[Round] | None = None) -> None:
        """Write a checkpoint. If that fails, record and print the error and continue.

        Older checkpoints are intact.
        """
        self.saved = mark
        self.positions.flush()
        began = time.monotonic()
        try:
            num_bytes = self.checkpoints.save(mark, training_state(self.sync), self._meta(owed or []))
        except OSError as error:
            self.recorder.event("checkpoint_failed", round=mark.round, error=str(error))
            print(f"aedit: checkpoint {mark.name} failed: {error}; older ones are intact", flush=True)
            return
        finally:
            seconds = time.monotonic() - began
            self.recorder.clock.other_s += seconds
            self.saves_from_s = began + seconds / self.config.checkpoint.time_share
        self.recorder.event(
            "checkpoint", round=mark.round, step=self.sync.steps, seconds=seconds, bytes=num_bytes
        )

    def _meta(self, owed: list[Round]) -> dict[str, Any]:
        clock = self.recorder.clock
        seconds = {"elapsed_s": clock.elapsed_s, "busy_s": clock.busy_s, "other_s": clock.other_s}
        return {
            "facts": self.facts,
            "sync": snapshot.numbers(self.sync, owed),
            "order": self.objective.order_state(),
            "objective": self.objective.state(),
            "tokens": self.tokens,
            "cuda_rng": torch.cuda.get_rng_state().tolist() if self.world.device.type == "cuda" else [],
            "clock": seconds | {"waited_s": self.sync.waited_s, "idle_used_s": self.idle_used_s},
        }

    # -- records

    def begin_positions(self, attempt: int) -> None:
        """Begin the records of the stream's positions in this attempt."""
        apart = {unit.name for unit in self.sync.exchange.apart}
        own = [i for i, unit in enumerate(self.sync.units) if unit.name not in apart]
        self.positions.start(
            attempt=attempt,
            node=self.world.node,
            name=self.hub.options.name if self.hub is not None else "",
            kind="rl" if self.config.prompts.source else "text",
            step=self.sync.steps,
            units=ranges_of(np.array(own, np.int64)),
            leases=self.hub is not None,
            warmup=self.config.edit.warmup_steps,
        )

    def record_open(self, outcome: RoundOutcome) -> None:
        """Record a round that is about to send its units. Called by `sync`."""
        numbers = list(map(self.hub.next_number, outcome.units)) if self.hub is not None else ()
        self.positions.opened(outcome.round.id, self.sync.steps, outcome.units, outcome.distrusted, numbers)

    def record_round(self, outcome: RoundOutcome, waited_s: float) -> None:
        """Record a round that has landed, or that the hub has refused as a whole. Called by `sync`."""
        sent = self.sync.exchange.bytes_sent
        per_unit = dict(zip(outcome.units, range(len(outcome.units)), strict=True))

        def spread(values: tuple[float, ...]) -> list[float | None]:
            known = per_unit if values else {}  # a hub does not send weights to the nodes
            return [values[known[i]] if i in known else None for i in range(len(self.sync.units))]

        self.positions.ended(
            outcome.round.id,
            self.sync.steps,
            refused=outcome.refused,
            distrusted=outcome.distrusted,
            rolled_back=outcome.rolled_back,
        )
        refused = bool(outcome.units) and {*outcome.units} <= {*outcome.refused}
        self.num_accepted += not refused
        self.recorder.event(
            "round_refused" if refused else "round",
            id=outcome.round.id,
            step=self.sync.steps,
            steps=outcome.round.steps,
            wait_s=round(waited_s, 6),
            bytes=sent - self.bytes_before,
            norms=spread(outcome.norms),
            weights=spread(outcome.weights),
            distrusted=list(outcome.distrusted),
            effective_nodes=spread(outcome.effective_nodes),
            rolled_back=list(outcome.rolled_back),
            refused=list(outcome.refused),
            nodes=outcome.nodes,
            total_steps=outcome.total_steps,
        )
        self.bytes_before = sent
        if outcome.healed_from is not None:
            self.recorder.event("heal", round=outcome.round.id, from_node=outcome.healed_from)

    def record_metrics(self) -> None:
        """Write one line of metrics. All ranks of the node together, as the loss is a mean over them."""
        clock = self.recorder.clock
        if self.meter.num_steps:  # the final line may follow the previous one without a step in between
            self.newest_loss = self.meter.mean_loss(self.sync.shards)
        own = self.objective.metrics()
        self.rl = RLMetric.of(own.get("rl"))
        if self.alerts is not None:
            spent_s = clock.busy_s + self.sync.waited_s
            self.alerts.look(
                self.newest_loss, self.rl, self.sync.steps, accepted=self.num_accepted, spent_s=spent_s
            )
        self.recorder.metrics(
            step=self.sync.steps,
            round=self.sync.round_id,
            tokens=self.tokens,
            loss=self.newest_loss,
            lr=self.lr,
            grad_norm=self.meter.norm(),
            busy_s=round(clock.busy_s, 4),
            wait_s=round(self.sync.waited_s, 4),
            idle_used_s=round(self.idle_used_s, 4),
            other_s=round(clock.other_s, 4),
            progress=round(self.budget.progress(), 5),
            **own,
        )
