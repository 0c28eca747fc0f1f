"""The thread that runs engines: samples come in from any thread, and their tokens go to receivers.

One thread steps the engines of all lines in turn. Everything that changes an engine (start, cancellation,
deadline, new weights) happens in this thread between two steps: other threads ask for it by commands. The
state that they share is used under a lock that is never held during a step.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from aedit.spec_rollout.engine import Engine, Scoring
from aedit.spec_rollout.sampling import Prompt
from aedit.spec_rollout.server.host_figures import HostFigures
from aedit.spec_rollout.server.host_line import HostLine, LineWeights, NewWeights, OnNewVersion, settle
from aedit.spec_rollout.server.tickets import (
    DeadlinePassed,
    HostEnding,
    HostLimits,
    HostTicket,
    LineClosed,
    Overloaded,
    PauseReplaced,
    Priority,
    SampleReceiver,
    WaitingSamples,
)
from aedit.traces import TraceContext

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Longest wait without a look at the state."""

Pause = Literal["off", "wait", "keep"]
"""off: samples start and run; wait: those that run go on, none starts; keep: nothing is computed."""

IdleWindow = Callable[[str], AbstractContextManager[None]]
"""`IdleWork.window`."""


class EngineHost:
    """Engines of several lines in one thread. Public methods may be called from any thread."""

    def __init__(
        self, limits: HostLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread.

        Args:
            limits: Of waiting samples and lines.
            clock: Monotonic seconds, for deadlines and figures.
        """
        self.limits, self._clock = limits or HostLimits(), clock
        self._opening: set[str] = set()
        self._changed = threading.Condition()
        self.idle: IdleWindow = lambda cause: nullcontext()
        """Returns the context manager that the thread enters while it has no work; see `IdleWork.window`."""
        self._lines: dict[str, HostLine] = {}
        self._waiting = WaitingSamples(self.limits)
        self._commands = deque[Callable[[], None]]()
        self._calls: set[Future[Any]] = set()
        """Calls that have not ended."""
        self._figures = HostFigures(clock)
        self._num_live = 0
        """Samples that wait or are in an engine."""
        self._next_deadline_s = math.inf
        """No deadline of a sample is before this time."""
        self._pause: Pause = "off"
        self._pausing: list[Future[None]] = []
        """Futures of `pause_after_running` that have not ended."""
        self._is_ending = self._is_closing = False
        self.error: BaseException | None = None
        """Error of which the thread has died, else None."""
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name="engine host", daemon=True)
        self._thread.start()

    # --- lines

    def open(
        self, line: str, make: Callable[[], Engine], *, between_steps: Callable[[], None] = lambda: None
    ) -> None:
        """Add a line.

        Args:
            line: Its name.
            make: Returns its engine, which then belongs to the host. Called here, in the caller's thread.
            between_steps: Called in the engine's thread before each step of this line, for example to adopt a
                new drafter.

        Raises:
            ValueError: There is a line of this name, or `max_lines` are open.
        """
        with self._changed:
            self._check_alive()
            names = {*self._lines, *self._opening}
            if line in names:
                raise ValueError(f"line {line!r} is open already: close it first, or choose another name")
            if len(names) >= self.limits.max_lines:
                raise ValueError(f"max_lines {self.limits.max_lines}: line {line!r} would be one more")
            self._opening.add(line)
        try:
            engine = make()
            weights = LineWeights(engine, self._changed)
            made = HostLine(line, engine, between_steps, self._forget, weights)
            with self._changed:
                self._check_alive()
                self._lines[line] = made
                self._figures.update(made)
        finally:
            with self._changed:
                self._opening.discard(line)

    def close_line(self, line: str) -> None:
        """Remove a line; its samples fail. Does nothing if there is no such line."""
        self._do(partial(self._close_line_now, line))

    def lines(self) -> list[str]:
        """Return the names of the lines."""
        with self._changed:
            return list(self._lines)

    def engine(self, line: str) -> Engine:
        """Return the engine of a line, for its constants such as `target.max_tokens` and `version`.

        Raises:
            LineClosed: There is no such line.
        """
        with self._changed:
            self._check_alive()
            return self._line(line).engine

    # --- samples

    def submit(
        self,
        line: str,
        prompt: Prompt,
        receiver: SampleReceiver,
        *,
        priority: Priority = Priority.PUBLIC,
        min_version: int = 0,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
    ) -> HostTicket:
        """Queue a sample. While another sample with the same ids is here, it waits for that one's end.

        Args:
            line: Whose policy generates.
            prompt: The sample.
            receiver: Gets its tokens and its end.
            priority: Samples of priority RUN come first, and take the rows of public ones.
            min_version: Policy version that the sample waits for.
            deadline_s: Seconds from now after which it fails with `DeadlinePassed`.
            trace: Span above those of the sample; None: that of the calling block.

        Raises:
            ValueError: The engine of this line cannot serve the prompt.
            Overloaded: Too many samples wait.
            LineClosed: There is no such line.
            HostEnding: The host is ending.
            RuntimeError: The thread has died.
        """
        self.engine(line).check(prompt)
        with self._changed:
            self._check_alive()
            if self._is_ending:
                raise HostEnding("the server is ending and takes no samples")
            self._line(line)
            until_s = math.inf if deadline_s is None else self._clock() + deadline_s
            ticket = HostTicket(line, prompt, receiver, priority, min_version, until_s)
            self._waiting.check_room(ticket, self._figures.refuse)
            ticket.trace(trace)
            self._waiting.append(ticket)
            self._num_live += 1
            self._next_deadline_s = min(self._next_deadline_s, until_s)
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: HostTicket) -> None:
        """End a sample between two steps: it ends with finish_reason "abort". Idempotent."""
        with suppress(RuntimeError):  # its thread has ended: so has the sample
            self._do(partial(self._cancel_now, ticket))

    def abort_all(self, line: str | None = None) -> None:
        """End all samples, of one line or of all, with finish_reason "abort"."""
        self._do(partial(self._abort_all_now, line))

    def score(self, line: str, scoring: Scoring) -> Future[Scoring]:
        """Queue a text to score. A part of it is computed with each step of the line.

        Returns:
            A future of the same object with its results. It may be cancelled.

        Raises:
            Overloaded: As many texts wait as public samples may.
            LineClosed: There is no such line.
            HostEnding: The host is ending.
            RuntimeError: The thread has died.
        """
        done: Future[Scoring] = Future()
        with self._changed:
            self._check_alive()
            if self._is_ending:
                raise HostEnding("the server is ending and takes no texts")
            queue, most = self._line(line).scorings, self.limits.max_waiting_public
            if len(queue) >= most:
                message = f"max_waiting_public {most}: so many texts wait already"
                raise Overloaded(message, self._figures.refuse(len(queue)))
            queue.append((scoring, done))
            self._changed.notify_all()
        return done

    # --- weights

    def swap(
        self,
        line: str,
        prepare: Callable[[], Mapping[str, Tensor]],
        version: int,
        on_new_version: OnNewVersion = "recompute",
    ) -> Future[None]:
        """Replace the weights of a line between two steps, without a pause.

        They are prepared beside those in use, in another thread; several versions one after the other.

        Args:
            line: The line.
            prepare: Returns the new weights. Called in a thread of the line's weights.
            version: Their version, above that of the engine.
            on_new_version: "recompute": running samples go on with the new weights; their texts are computed
                again, `EngineLimits.prefill_tokens` at a time between steps. "finish": samples that have
                begun end with the old weights, in an engine of their own without drafters; the next version
                is prepared when they have ended.

        Returns:
            A future that ends when the weights are in use, or with the error of `prepare` or the engine. The
            old weights are then in use.
        """
        if on_new_version not in get_args(OnNewVersion):
            known = " or ".join(get_args(OnNewVersion))
            raise ValueError(f"on_new_version must be {known}, got {on_new_version!r}")
        new = NewWeights(prepare, version, on_new_version)
        with self._changed:
            self._check_alive()
            self._line(line).weights.add(new)
        return new.done

    def call(self, line: str, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine of a line between two steps; return a future of its result."""
        done: Future[T] = Future()
        with self._changed:
            self._line(line)
            self._do(partial(self._call_now, line, function, done))
            self._calls.add(done)
        return done

    # --- state

    def pause(self) -> None:
        """Stop stepping after the current step. Samples stay where they are; new ones are queued."""
        self._set_pause("keep")

    def pause_after_running(self) -> Future[None]:
        """Start no further samples; those that run go on to their ends, and the others are queued.

        Returns:
            A future that ends when no sample runs, or with `PauseReplaced` if `resume` or `pause` is called
            before.
        """
        done: Future[None] = Future()
        with self._changed:
            self._check_alive()
            self._pause = "wait"
            self._pausing.append(done)
            self._changed.notify_all()
        return done

    def resume(self) -> None:
        """Go on after `pause` or `pause_after_running`."""
        self._set_pause("off")

    @property
    def is_paused(self) -> bool:
        """Return true from `pause` or `pause_after_running` on until `resume`."""
        return self._pause != "off"

    def status(self) -> dict[str, Any]:
        """Return counts, speed and queue lengths.

        `lines` has `Engine.status` of each line as it was a fraction of a second ago.
        """
        with self._changed:
            counts: dict[str, Any] = {}
            for each in Priority:
                name = each.name.lower()
                counts[f"waiting_{name}"] = self._waiting.count(each)
                counts[f"waiting_{name}_tokens"] = self._waiting.num_tokens(each)
            return {
                "samples": self._num_live,
                **counts,
                "paused": self._pause != "off",
                "ending": self._is_ending,
                "error": "" if self.error is None else repr(self.error),
                **self._figures.status(),
            }

    def drain(self, timeout_s: float) -> bool:
        """Take no further samples, and wait for those that are here; return whether all are over."""
        with self._changed:
            self._is_ending = True
            return self._changed.wait_for(lambda: not self._num_live or self.error is not None, timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread after the current step. Samples that are here fail with `HostEnding`.

        Raises:
            TimeoutError: The current step has not ended in time.
        """
        with self._changed:
            self._is_ending = self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine's current step has not ended within {timeout_s:g} s")

    # --- the state, under the lock

    def _check_alive(self) -> None:
        """Check that the thread runs.

        Raises:
            RuntimeError: It has died.
            HostEnding: The host was closed.
        """
        if self.error is not None:
            raise RuntimeError(f"the engine's thread has died: {self.error!r}") from self.error
        if self._is_closing:
            raise HostEnding("the server is ending and takes no samples")

    def _line(self, name: str) -> HostLine:
        """Return a line.

        Raises:
            LineClosed: There is none of this name.
        """
        found = self._lines.get(name)
        if found is None:
            known = ", ".join(map(repr, self._lines)) or "none"
            raise LineClosed(f"there is no line {name!r}; open lines: {known}")
        return found

    def _do(self, command: Callable[[], None]) -> None:
        """Let the thread run a command between two steps."""
        with self._changed:
            self._check_alive()
            self._commands.append(command)
            self._changed.notify_all()

    def _set_pause(self, pause: Pause) -> None:
        """Stop or go on. What `pause_after_running` has returned fails."""
        with self._changed:
            self._pause = pause
            replaced, self._pausing = self._pausing, []
            self._changed.notify_all()
        what = "resumed" if pause == "off" else "paused in another way"
        for done in replaced:
            settle(done, PauseReplaced(f"the server was {what} before the running samples had ended"))

    def _forget(self, ticket: HostTicket) -> None:
        """Take note that a sample is over."""
        with self._changed:
            self._num_live -= 1
            self._figures.num_over += 1
            if not self._num_live:
                self._changed.notify_all()

    def _is_ready(self, line: HostLine, priority: Priority) -> bool:
        """Return true if a waiting sample of this priority can start."""
        version = line.engine.version
        return bool(self._waiting.first(line.name, priority, 1, lambda t: t.min_version <= version))

    def _is_busy(self, line: HostLine) -> bool:
        if self._pause != "off":
            return self._pause == "wait" and line.is_running
        return line.is_busy or any(self._is_ready(line, each) for each in Priority)

    def _has_run_samples(self, line: HostLine) -> bool:
        return line.has_run_samples or self._is_ready(line, Priority.RUN)

    # --- the thread

    def _run(self) -> None:
        """Step until the host is closed, or until an error of which no single sample is the cause."""
        try:
            while not self._is_closing:
                self._run_commands()
                self._expire()
                if (line := self._next_line()) is None:
                    self._update_figures(now=True)
                    self._end_pausing()
                    self._wait()
                else:
                    self._step(line)
            self._end_all(HostEnding("the server is ending"))
        except BaseException as error:
            log.exception("the engine's thread has died")
            self.error = error
            self._end_all(RuntimeError(f"the engine's thread has died: {error!r}"))

    def _run_commands(self) -> None:
        if self._commands:
            while self._commands:
                self._commands.popleft()()
            self._update_figures()
        with self._changed:
            changed = [line for line in self._lines.values() if line.weights.is_prepared]
        for line in changed:
            line.take_over_weights()
            with self._changed:
                self._figures.update(line)

    def _update_figures(self, *, now: bool = False) -> None:
        """Update the figures of all lines: also those that do not step may have fewer samples than before."""
        with self._changed:
            for line in self._lines.values():
                self._figures.update(line, now=now)

    def _next_line(self) -> HostLine | None:
        """Return the line whose turn it is; None if no line has work."""
        with self._changed:
            busy = list(filter(self._is_busy, self._lines.values()))
            if not busy:
                return None
            first = [line for line in busy if self._has_run_samples(line)]
            others = [line for line in busy if line not in first]
            self._turn += 1
            is_for_others = others and (not first or self._turn % self.limits.public_every == 0)
            line = min(others if is_for_others else first, key=lambda each: each.turn)
            line.turn = self._turn
            return line

    def _step(self, line: HostLine) -> None:
        with self._changed:
            starts = self._pause != "wait"
            chosen = line.choose(self._waiting) if starts else []
            for ticket in chosen:
                self._waiting.remove(ticket)
        evicted = line.evict(len(chosen))
        with self._changed:
            for ticket in evicted:
                self._waiting.put_first(ticket)
        line.start(chosen)
        line.step(starts=starts)
        with self._changed:
            self._figures.update(line)

    def _end_pausing(self) -> None:
        """End the futures of `pause_after_running` if nothing runs and no command waits."""
        with self._changed:
            if self._commands or self._pause != "wait" or any(map(self._is_busy, self._lines.values())):
                return
            ended, self._pausing = self._pausing, []
        for done in ended:
            settle(done, None)

    def _wait(self) -> None:
        """Wait for work, a command, or the next deadline."""
        until_s = self._next_deadline_s

        def has_news() -> bool:
            if self._is_closing or self._commands or self._pausing or self._next_deadline_s < until_s:
                return True
            if any(line.weights.is_prepared for line in self._lines.values()):
                return True
            return any(map(self._is_busy, self._lines.values()))

        cause = "weights" if self._num_live else "no requests"
        with self.idle(cause) if self._pause == "off" else nullcontext(), self._changed:
            self._changed.wait_for(has_news, min(MAX_WAIT_S, max(0.0, until_s - self._clock())))

    def _expire(self) -> None:
        """Let samples fail whose deadline has passed."""
        now_s = self._clock()
        if now_s < self._next_deadline_s:
            return
        with self._changed:
            live = [
                *self._waiting,
                *(each for line in self._lines.values() for each in line.tickets.values()),
            ]
            self._next_deadline_s = min(
                (t.deadline_s for t in live if t.deadline_s > now_s), default=math.inf
            )
        for ticket in live:
            if ticket.deadline_s <= now_s:
                self._take(ticket).fail(ticket, DeadlinePassed("the sample was not finished in time"))
        self._update_figures()

    def _take(self, ticket: HostTicket) -> HostLine:
        """Remove a sample from the waiting ones, if it is there, and return its line."""
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            return self._lines[ticket.line]

    # --- commands

    def _cancel_now(self, ticket: HostTicket) -> None:
        """End a sample, unless it is over."""
        if not ticket.is_over:
            self._take(ticket).abort(ticket)

    def _abort_all_now(self, name: str | None) -> None:
        """End the samples of a line, or of all."""
        with self._changed:
            live = [each for line in self._lines.values() for each in line.tickets.values()]
            live += self._waiting
        for ticket in live:
            if name in (None, ticket.line):
                self._take(ticket).abort(ticket)

    def _close_line_now(self, name: str, error: Exception | None = None) -> None:
        """Remove a line; its samples fail."""
        reason = error or LineClosed(f"line {name!r} was closed")
        with self._changed:
            line = self._lines.pop(name, None)
            waiting = [ticket for ticket in self._waiting if ticket.line == name]
            for ticket in waiting:
                self._waiting.remove(ticket)
            self._figures.forget(name)
        if line is None:
            return
        for ticket in [*line.tickets.values(), *waiting]:
            line.fail(ticket, reason)
        for _, done in line.scorings:
            settle(done, reason)
        line.engine.close()
        with self._changed:
            line.weights.close(reason)

    def _call_now(self, name: str, function: Callable[[Engine], T], done: Future[T]) -> None:
        """Call a function with the engine of a line."""
        try:
            with self._changed:
                line = self._line(name)
            result = function(line.engine)
            with self._changed:
                self._figures.update(line)
        except Exception as error:
            settle(done, error)
        else:
            settle(done, None, result)
        self._calls.discard(done)

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            names = list(self._lines)
            self._commands.clear()
            pausing, self._pausing = self._pausing, []
            self._changed.notify_all()
        for name in names:
            self._close_line_now(name, error)
        for done in (*self._calls, *pausing):
            settle(done, error)
        self._calls.clear()
