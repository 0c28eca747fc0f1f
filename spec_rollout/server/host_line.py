"""One line of an `EngineHost`: its engine, the samples that are in it, and its new weights.

The host's thread uses it; another thread prepares new weights, which are taken over between two steps.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from aedit.spec_rollout.engine import Engine, NoNextTokenError, Scoring, Step, WeightSwap
from aedit.spec_rollout.model import KVMemoryError
from aedit.spec_rollout.sampling import Rollout, SampleKey
from aedit.spec_rollout.server.tickets import HostTicket, Priority, WaitingSamples

log = logging.getLogger(__name__)

OnNewVersion = Literal["recompute", "finish"]


@dataclass(frozen=True, slots=True)
class NewWeights:
    """One version for a line. prepare: returns the weights."""

    prepare: Callable[[], Mapping[str, Tensor]]
    version: int
    on_new_version: OnNewVersion
    done: "Future[None]" = field(default_factory=Future)

    def settle(self, error: BaseException | None = None) -> None:
        """End `done`, unless it has ended."""
        with suppress(InvalidStateError):
            self.done.set_exception(error) if error is not None else self.done.set_result(None)


class LineWeights:
    """The queue of new weights of one line; a thread prepares them, one version at a time.

    There is room for one set of weights besides those in use. After `finish` the samples that have begun use
    it: the next version is prepared when they have ended.
    """

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        """Make an empty queue.

        Args:
            engine: Of the line.
            changed: The host's lock.
        """
        self._engine, self._changed = engine, changed
        self._queue = deque[NewWeights]()
        self._swap: WeightSwap | None = None
        self._is_prepared = self._is_closed = self._is_running = False
        self.finishing: Engine | None = None
        """Ends samples that have begun with older weights. Written by the engine's thread."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the second set of weights."""
        return 0 if self._swap is None else self._swap.num_bytes

    @property
    def is_prepared(self) -> bool:
        """Return true if `take_over` is to be called before the next step."""
        return self._is_prepared

    def add(self, new: NewWeights) -> None:
        """Queue a version. The caller has the lock."""
        self._queue.append(new)
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._prepare_all, name="weights", daemon=True).start()

    def close(self, error: BaseException) -> None:
        """End all that is queued with an error. The caller has the lock."""
        self._is_closed = True
        for new in self._queue:
            new.settle(error)
        self._changed.notify_all()

    def take_over(self) -> None:
        """Use the prepared weights from the next step on; called by the engine's thread."""
        assert self._swap is not None
        new = self._queue[0]
        error = None
        try:
            if new.on_new_version == "finish":
                self.finishing = self._swap.finish(new.version)
            else:
                self._swap.recompute(new.version)
        except ValueError as refused:
            error = refused
        self._next(new, error)

    def finished(self) -> None:
        """Take note that the samples of `finishing` have ended; called by the engine's thread."""
        with self._changed:
            self.finishing = None
            self._changed.notify_all()

    def _next(self, new: NewWeights, error: BaseException | None) -> None:
        with self._changed:
            self._queue.popleft()
            self._is_prepared = False
            self._changed.notify_all()
        new.settle(error)

    def _prepare_all(self) -> None:
        while (new := self._first()) is not None:
            try:
                self._prepare(new)
            except BaseException as error:
                self._next(new, error)
                continue
            with self._changed:
                self._is_prepared = True
                self._changed.notify_all()

    def _first(self) -> NewWeights | None:
        """Return the next version to prepare, when the second set is free; None ends the thread."""
        with self._changed:
            # The engine's thread notifies after each change, and also when it ends.
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or not self._queue
                    or not (self._is_prepared or self.finishing is not None)
                )
            )
            self._is_running = bool(self._queue) and not self._is_closed
            return self._queue[0] if self._is_running else None

    def _prepare(self, new: NewWeights) -> None:
        version = self._engine.version
        if new.version <= version:
            raise ValueError(f"version {new.version} is not above version {version}, which the engine has")
        weights = new.prepare()
        if self._swap is None:
            self._swap = self._engine.weight_swap()
        self._swap.fill(weights)


class HostLine:
    """An engine with its samples. Each sample here is running or first in line for a row."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        between_steps: Callable[[], None],
        over: Callable[[HostTicket], None],
        weights: LineWeights,
    ) -> None:
        """Make a line.

        Args:
            name: Name of the line.
            engine: Its engine, without samples.
            between_steps: Called before each step.
            over: Called when a sample has left the host, before its receiver is.
            weights: Its new weights.
        """
        self.name, self.engine, self._between_steps, self._over = name, engine, between_steps, over
        self.weights = weights
        self.tickets: dict[SampleKey, HostTicket] = {}
        """Samples in the engine, by the key of their noise."""
        self._finishing: set[SampleKey] = set()
        """Samples in the engine that ends those of older weights."""
        self.scorings = deque[tuple[Scoring, Future[Scoring]]]()
        """Texts to score, in the order in which they came. A part of the first one goes with each step."""
        self.turn = 0
        """Number of its last turn."""

    @property
    def num_free(self) -> int:
        """Return the number of further samples that get a row."""
        return self.engine.target.rows - len(self.tickets) + len(self._finishing)

    @property
    def num_finishing(self) -> int:
        """Return the number of samples that end with older weights."""
        return len(self._finishing)

    @property
    def is_running(self) -> bool:
        """Return true if samples are in the engine, or a text is scored in part."""
        return bool(self.tickets) or self._is_scoring

    @property
    def _is_scoring(self) -> bool:
        return bool(self.scorings) and self.scorings[0][0].has_begun

    @property
    def is_busy(self) -> bool:
        """Return true if samples are in the engine, or texts wait to be scored."""
        return bool(self.tickets or self.scorings)

    @property
    def has_run_samples(self) -> bool:
        """Return true if a sample of priority RUN is in the engine."""
        return any(ticket.priority is Priority.RUN for ticket in self.tickets.values())

    def choose(self, waiting: WaitingSamples) -> list[HostTicket]:
        """Return the waiting samples that come into the engine now.

        Samples of priority RUN may be more than there are free rows: public ones give up theirs.
        """
        taken = set(self.tickets)

        def fits(ticket: HostTicket) -> bool:
            # Two samples with one key would have the same noise: the second waits for the end of the first.
            prompt = ticket.prompt
            if ticket.min_version > self.engine.version or (prompt.has_key and prompt.key in taken):
                return False
            taken.update([prompt.key] if prompt.has_key else [])
            return True

        num_public = len(self._public())
        found = waiting.first(self.name, Priority.RUN, self.num_free + num_public, fits)
        return found + waiting.first(self.name, Priority.PUBLIC, self.num_free - len(found), fits)

    def evict(self, num_needed: int) -> list[HostTicket]:
        """Take public samples out of the engine until so many rows are free, those that came last first.

        Returns:
            Samples that continue later, with the tokens that they have.
        """
        evicted = []
        for ticket in reversed(self._public()):
            if self.num_free >= num_needed:
                break
            assert ticket.rollout is not None
            del self.tickets[ticket.rollout.prompt.key]
            ticket.prompt, ticket.rollout = self.engine.remove(ticket.rollout), None
            ticket.queue()
            evicted.append(ticket)
        return evicted

    def take_over_weights(self) -> None:
        """Generate with weights that have been prepared."""
        self.weights.take_over()
        old = self.weights.finishing
        if old is None:
            return
        begun = [*old.running, *old.waiting]
        self._finishing = {rollout.prompt.key for rollout in begun}
        for rollout in (*begun, *self.engine.running, *self.engine.waiting):
            self.tickets[rollout.prompt.key].rollout = rollout

    def start(self, chosen: Sequence[HostTicket]) -> None:
        """Bring samples into the engine, which has room for them."""
        for ticket in chosen:
            try:
                rollout = self.engine.add(ticket.prompt)
            except ValueError as error:
                self.fail(ticket, error)
                continue
            ticket.rollout = rollout
            ticket.queued.end()
            self.tickets[rollout.prompt.key] = ticket

    def step(self, *, starts: bool = True) -> None:
        """Run one step of the engine and call the receivers.

        A sample for which the engine has no next token or no memory fails; the others go on.

        Args:
            starts: The first text to score may be begun.
        """
        self._between_steps()
        if self._is_scoring or (starts and self.scorings):
            self._score()
        if self.weights.finishing is not None:
            self._step(self.weights.finishing)
        self._step(self.engine)

    def _step(self, engine: Engine) -> None:
        try:
            step = engine.step()
        except NoNextTokenError as error:
            self._fail_rollouts(error.rollouts, error)
        except KVMemoryError as error:  # for one sample alone: the last running one, or the first to start
            self._fail_rollouts((*engine.running[-1:], *engine.waiting)[:1], error)
        except ValueError as error:
            self._fail_rollouts((*engine.running, *engine.waiting), error)
        else:
            self._report(step)

    def _score(self) -> None:
        """Compute a part of the first text to score."""
        scoring, done = self.scorings[0]
        if done.cancelled():
            self.scorings.popleft()
            return
        try:
            is_last = scoring.advance(self.engine)
        except (ValueError, IndexError, RuntimeError) as error:
            self.scorings.popleft()
            settle(done, error)
        else:
            if is_last:
                self.scorings.popleft()
                settle(done, None, scoring)

    def abort(self, ticket: HostTicket) -> None:
        """End a sample that waits or is in the engine."""
        rollout = ticket.prompt.to_rollout() if ticket.rollout is None else self._drop(ticket)
        rollout.finish_reason = "abort"
        ticket.end_spans(rollout)
        self._leave(ticket)
        _report_to(ticket, ticket.receiver.ended, rollout)

    def fail(self, ticket: HostTicket, error: Exception) -> None:
        """Let a sample fail that waits or is in the engine."""
        if ticket.rollout is not None:
            self._drop(ticket)
        ticket.end_spans(error=error)
        self._leave(ticket)
        _report_to(ticket, ticket.receiver.failed, error)

    def _report(self, step: Step) -> None:
        finished = {rollout.prompt.key for rollout in step.finished}
        for rollout, count in zip(step.rollouts, step.counts, strict=True):
            key = rollout.prompt.key
            ticket = self.tickets[key]
            start = len(rollout.tokens) - count
            is_received = _report_to(ticket, ticket.receiver.tokens, rollout, start)
            if key in finished:
                self._forget(key)
            elif not is_received:
                self._drop(ticket)
            if not is_received or key in finished:
                ticket.end_spans(rollout)
                self._leave(ticket)
            if is_received and key in finished:
                _report_to(ticket, ticket.receiver.ended, rollout)

    def _fail_rollouts(self, rollouts: Sequence[Rollout], error: Exception) -> None:
        if not rollouts:
            raise error
        for rollout in rollouts:
            self.fail(self.tickets[rollout.prompt.key], error)

    def _drop(self, ticket: HostTicket) -> Rollout:
        rollout = ticket.rollout
        assert rollout is not None
        old, key = self.weights.finishing, rollout.prompt.key
        engine = old if old is not None and key in self._finishing else self.engine
        engine.remove(rollout)
        self._forget(key)
        return rollout

    def _forget(self, key: SampleKey) -> None:
        """Take note that a sample has left its engine."""
        del self.tickets[key]
        if key in self._finishing:
            self._finishing.remove(key)
            if not self._finishing:
                self.weights.finished()

    def _public(self) -> list[HostTicket]:
        """Return the public samples in the engine, without those that end with older weights."""
        return [
            ticket
            for key, ticket in self.tickets.items()
            if ticket.priority is Priority.PUBLIC and key not in self._finishing
        ]

    def _leave(self, ticket: HostTicket) -> None:
        ticket.is_over = True
        self._over(ticket)


def _report_to(ticket: HostTicket, call: Callable[..., None], *arguments: Any) -> bool:
    """Call a receiver; return whether it did not raise."""
    try:
        call(*arguments)
    except Exception:
        log.exception("the receiver of sample %s raised: it gets nothing more", ticket.prompt.name)
        return False
    return True


def settle(done: Future[Any], error: Exception | None, result: Any = None) -> None:
    """End a future, unless it was cancelled."""
    if done.cancelled() or not done.set_running_or_notify_cancel():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
