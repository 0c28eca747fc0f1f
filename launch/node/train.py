"""The training loop of one node."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from aedit.edit import snapshot
from aedit.edit.exchange import RoundOutcome
from aedit.edit.sync import LayerSync
from aedit.launch.config.config import RunConfig
from aedit.launch.data.order import Order
from aedit.launch.data.samples import Corpus, batch
from aedit.launch.node.budget import Budget
from aedit.launch.node.checkpoint import Checkpoints, Mark
from aedit.launch.node.evaluate import held_out_loss
from aedit.launch.node.inner import lr_at, set_lr
from aedit.launch.node.meter import StepMeter
from aedit.launch.node.model import loss
from aedit.launch.node.participation import Participation, WorldParticipation
from aedit.launch.node.resume import Resumed, training_state
from aedit.launch.node.stop import Stop, Stopped
from aedit.launch.node.world import World
from aedit.launch.rundir.recorder import Recorder
from aedit.types import Round


def train(node: "Node") -> None:
    """Train until the run's budget is used up or somebody asks to stop; then save and leave with the
    others."""
    node.begin()
    try:
        with node.sync:
            node.reopen_abandoned_rounds()
            while node.goes_on():
                node.stop.check()
                node.accumulate_gradients()
                node.sync.average_gradients()  # only while warming up
                node.inner_step()
                node.sync.step()  # opens a round if one is due; layers land under the next forward
                node.note_step()
                node.evaluate_after_a_round()
                node.save_after_a_round()
    except Stopped:
        node.leave_early()
    else:
        node.arrive()


@dataclass(slots=True, kw_only=True)
class Node:
    """Everything one node trains with. Made by `aedit.launch.node.build.build`; methods are sentences of
    `train`."""

    config: RunConfig
    world: World
    corpus: Corpus
    order: Order
    sync: LayerSync
    budget: Budget
    stop: Stop
    checkpoints: Checkpoints
    recorder: Recorder
    facts: dict[str, Any]
    slowdown: float
    participation: Participation = field(default_factory=WorldParticipation)
    resumed: bool = False
    owed: list[Round] = field(default_factory=list)
    tokens: int = 0
    lr: float = 0.0
    newest_loss: float = float("nan")
    """Training loss, mean between the last two lines of metrics."""
    saved: Mark = field(default_factory=lambda: Mark(0))
    evaluated_round: int = 0
    bytes_before: int = 0
    meter: StepMeter = field(default_factory=StepMeter)

    # -- before and after

    def take_up(self, resumed: Resumed) -> None:
        """Go on from a checkpoint; `sync` has been restored already."""
        self.resumed, self.owed, self.tokens = True, resumed.owed, resumed.tokens
        self.saved, self.evaluated_round = resumed.mark, resumed.mark.round
        self.sync.waited_s = resumed.waited_s
        if resumed.cuda_rng and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(torch.tensor(resumed.cuda_rng, dtype=torch.uint8))
        self.recorder.clock.busy_s, self.recorder.clock.other_s = resumed.busy_s, resumed.other_s

    def begin(self) -> None:
        self.stop.listen()
        self.sync.while_waiting = self.stop.while_waiting
        self.sync.on_round = self.note_round
        if not self.resumed:
            self.evaluate()
        self.participation.begin(self)

    def reopen_abandoned_rounds(self) -> None:
        for round in self.owed:
            self.sync.begin(round)

    def arrive(self) -> None:
        """The regular end: everything has landed."""
        self.note_metrics()
        self.evaluate()
        if Mark(self.milestone) != self.saved:
            self.save(Mark(self.milestone))
        self.recorder.event("stop", reason="done", step=self.sync.steps, tokens=self.tokens)

    def leave_early(self) -> None:
        """Leave as the node's participation does, and save."""
        self.order = self.meter.undo_draw(self.order)
        self.stop.promise(self.sync.position)
        owed, reason = self.participation.leave_early(self)
        self.note_metrics()
        self.save(Mark(self.milestone, self._next_sub()), owed)
        self.recorder.event("stop", reason=reason, step=self.sync.steps, tokens=self.tokens)

    # -- one step

    def goes_on(self) -> bool:
        """Whether the budget asks for another step."""
        return self.budget.goes_on()

    def accumulate_gradients(self) -> None:
        self.meter.begin_step(self.order, self.sync.waited_s)
        for indices in self._draw():
            samples = batch(self.corpus.train, indices).to(self.world.device, non_blocking=True)
            mean = loss(self.sync.model, samples, self.config.model.dtype) / self.config.train.accumulate
            mean.backward()  # type: ignore[no-untyped-call]
            self.meter.add_loss(mean.detach())

    def inner_step(self) -> None:
        clip = self.config.train.grad_clip
        self.meter.grad_norm = torch.nn.utils.clip_grad_norm_(self.sync.model.parameters(), clip)
        self.lr = lr_at(self.budget.progress(), self.config.train)
        set_lr(self.sync.inner, self.lr)
        self.sync.inner.step()
        self.sync.inner.zero_grad()
        self.meter.stretch(self.sync.waited_s, self.slowdown)

    def note_step(self) -> None:
        train = self.config.train
        self.tokens += train.batch_size * train.accumulate * self.config.data.seq_len
        self.recorder.clock.busy_s += self.meter.end_step(self.sync.waited_s)
        if self.sync.shards.decide([self.recorder.line_is_due()])[0]:
            self.note_metrics()
        self.participation.note_step(self)

    def _draw(self) -> list[Any]:
        """This rank's share of the node's next samples, one entry per micro-batch."""
        train, world = self.config.train, self.world
        drawn = self.order.take(train.batch_size * train.accumulate)
        return [part[world.rank :: world.ranks] for part in drawn.reshape(train.accumulate, -1)]

    # -- where the run stands

    @property
    def milestone(self) -> int:
        """Counts rounds; in a run that never leaves the warm-up, what would be rounds."""
        if self.config.edit.warmup_steps == "all":
            return self.sync.steps // int(self.config.edit.every)
        return self.sync.round_id

    # -- evaluation and checkpoints

    def evaluate_after_a_round(self) -> None:
        every = self.config.train.eval_every
        if every and not self.sync.in_flight and self.milestone >= self.evaluated_round + every:
            self.evaluate()

    def evaluate(self) -> None:
        """Held-out loss, by one node: the others train on meanwhile."""
        self.evaluated_round = self.milestone
        if not self.budget.evaluates():
            return
        began = time.monotonic()
        held_out = held_out_loss(self.sync.model, self.corpus, self.config, self.sync.shards)
        self.recorder.clock.other_s += time.monotonic() - began
        self.recorder.event("eval", step=self.sync.steps, round=self.milestone, loss=held_out)

    def save_after_a_round(self) -> None:
        """At a step boundary with nothing under way; if there is none for a whole round, land first. A node
        of a hub need not: what is under way is its agent's."""
        every, behind = self.config.checkpoint.every, self.milestone - self.saved.round
        if not every or behind < every:
            return
        if self.sync.in_flight and behind > every and not self.sync.free:
            self.sync.finish()
        if not self.sync.in_flight or self.sync.free:
            self.save(Mark(self.milestone))

    def save(self, mark: Mark, owed: list[Round] | None = None) -> None:
        """Write a checkpoint. One that fails is loud, and training goes on: the older ones are intact."""
        self.saved = mark
        began = time.monotonic()
        try:
            num_bytes = self.checkpoints.save(mark, training_state(self.sync), self._meta(owed or []))
        except OSError as error:
            self.recorder.event("checkpoint_failed", round=mark.round, error=str(error))
            print(f"aedit: checkpoint {mark.name} failed: {error}; older ones are intact", flush=True)
            return
        finally:
            self.recorder.clock.other_s += time.monotonic() - began
        seconds = time.monotonic() - began
        self.recorder.event(
            "checkpoint", round=mark.round, step=self.sync.steps, seconds=seconds, bytes=num_bytes
        )

    def _meta(self, owed: list[Round]) -> dict[str, Any]:
        clock = self.recorder.clock
        seconds = {"elapsed_s": clock.elapsed_s, "busy_s": clock.busy_s, "other_s": clock.other_s}
        return {
            "facts": self.facts,
            "sync": snapshot.numbers(self.sync, owed),
            "order": self.order.state(),
            "tokens": self.tokens,
            "cuda_rng": torch.cuda.get_rng_state().tolist() if self.world.device.type == "cuda" else [],
            "clock": seconds | {"waited_s": self.sync.waited_s},
        }

    def _next_sub(self) -> int:
        """One above every checkpoint of this round on any node, so that none is overwritten."""
        here = [mark.sub for mark in self.checkpoints.marks() if mark.round == self.milestone]
        return self.stop.greatest("sub", 1 + max(here, default=0))

    # -- records

    def note_round(self, verdict: RoundOutcome, waited_s: float) -> None:
        sent = self.sync.exchange.bytes_sent
        per_unit = dict(zip(verdict.units, range(len(verdict.units)), strict=True))

        def spread(values: tuple[float, ...]) -> list[float | None]:
            known = per_unit if values else {}  # of a hub's weights a node hears nothing
            return [values[known[i]] if i in known else None for i in range(len(self.sync.units))]

        self.recorder.event(
            "round",
            id=verdict.round.id,
            step=self.sync.steps,
            steps=verdict.round.steps,
            wait_s=round(waited_s, 6),
            bytes=sent - self.bytes_before,
            norms=spread(verdict.norms),
            weights=spread(verdict.weights),
            distrusted=list(verdict.distrusted),
            effective_nodes=spread(verdict.effective_nodes),
            rolled_back=list(verdict.rolled_back),
            refused=list(verdict.refused),
            nodes=verdict.nodes,
            total_steps=verdict.total_steps,
        )
        self.bytes_before = sent
        if verdict.healed_from is not None:
            self.recorder.event("heal", round=verdict.round.id, from_node=verdict.healed_from)

    def note_metrics(self) -> None:
        """One line of metrics. All ranks of the node together: the loss is a mean over them."""
        clock = self.recorder.clock
        if self.meter.num_steps:  # at the end a line may follow the last one without a step in between
            self.newest_loss = self.meter.mean_loss(self.sync.shards)
        self.recorder.metrics(
            step=self.sync.steps,
            round=self.sync.round_id,
            tokens=self.tokens,
            loss=self.newest_loss,
            lr=self.lr,
            grad_norm=self.meter.norm(),
            busy_s=round(clock.busy_s, 4),
            wait_s=round(self.sync.waited_s, 4),
            idle_used_s=round(self.sync.idle_used_s, 4),
            other_s=round(clock.other_s, 4),
            progress=round(self.budget.progress(), 5),
        )
