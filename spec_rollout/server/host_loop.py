"""The loop of an `EngineHost`'s thread, the state that it shares with other threads, and its figures.

Other threads touch the state only under the lock `changed`, which is never held during a step. They change an
engine by commands, which the loop runs between two steps. Refused samples get times to come back that are
spread, so that they come as rows become free.
"""

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.server.host_line import HostLine, settle
from aedit.spec_rollout.server.tickets import (
    DeadlinePassed,
    HostEnding,
    HostLimits,
    HostTicket,
    LineClosed,
    PauseReplaced,
    Priority,
    WaitingSamples,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Longest wait without a look at the state."""

Pause = Literal["off", "wait", "keep"]
"""off: samples start and run; wait: those that run go on, none starts; keep: nothing is computed."""

IdleWindow = Callable[[str], AbstractContextManager[None]]
"""`IdleWork.window`."""


REFRESH_S = 0.2
"""Shortest time between two copies of the status of a busy engine."""
WINDOW_S = 10.0
"""Time over which speed is measured."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
RETURNS_PER_ROW = 2.0
"""Samples that come back for each one that ends. With fewer than one, rows would stay empty."""
MOST_RETURNS = 10_000
"""Refused samples that are counted, so that a flood of requests takes no memory."""


class HostFigures:
    """Copies of figures that only the host's thread may read. Not thread-safe: the host's lock guards it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[str, dict[str, Any]] = {}
        self._num_tokens: dict[str, int] = {}
        self._read_s: dict[str, float] = {}
        self._num_closed_tokens = 0
        self._marks = deque([(clock(), 0, 0)])
        self._retry_times = RetryTimes(clock)
        self.num_over = 0
        """Samples that have left the host."""

    def update(self, line: HostLine, *, now: bool = False) -> None:
        """Copy the status of a line's engine.

        While samples are in it, no more often than every `REFRESH_S`, unless `now`: no step may follow.
        """
        now_s, name = self._clock(), line.name
        self._num_tokens[name] = line.engine.meters.num_tokens
        if not now and line.tickets and now_s - self._read_s.get(name, -REFRESH_S) < REFRESH_S:
            return
        self._read_s[name] = now_s
        num_run = sum(ticket.priority is Priority.RUN for ticket in line.tickets.values())
        self._lines[name] = {
            **line.engine.status(),
            "rows": line.engine.target.rows,
            "run_samples": num_run,
            "public_samples": len(line.tickets) - num_run,
            "finishing_samples": line.num_finishing,
            "spare_weight_bytes": line.weights.num_bytes,
        }
        self._marks.append((now_s, self.num_tokens, self.num_over))
        while len(self._marks) > 2 and self._marks[1][0] < now_s - WINDOW_S:
            self._marks.popleft()

    def forget(self, name: str) -> None:
        """Drop a closed line."""
        self._num_closed_tokens += self._num_tokens.pop(name, 0)
        self._lines.pop(name, None)
        self._read_s.pop(name, None)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that all engines have generated."""
        return self._num_closed_tokens + sum(self._num_tokens.values())

    def refuse(self, num_waiting: int) -> float:
        """Return the seconds after which a sample that is refused now may come back (`RetryTimes.refuse`)."""
        return self._retry_times.refuse(num_waiting, self._per_s(2, self.num_over))

    def status(self) -> dict[str, Any]:
        """Return tokens, finished samples, tokens per second of the last seconds, and the lines."""
        return {
            "tokens": self.num_tokens,
            "over": self.num_over,
            "tokens_per_s": self._per_s(1, self.num_tokens),
            "lines": {name: dict(figures) for name, figures in self._lines.items()},
        }

    def _per_s(self, i: int, total: int) -> float:
        now_s = self._clock()
        recent = [mark for mark in self._marks if mark[0] >= now_s - WINDOW_S]
        if not recent or now_s <= recent[0][0]:
            return 0.0
        return float(total - recent[0][i]) / (now_s - recent[0][0])


class RetryTimes:
    """Gives each refused sample a time, and counts it as one that will come back then. Not thread-safe.

    If all refused samples got the time at which the queue is empty, they would come back together: many
    clients would be refused again and again, and their requests would take the processor from the samples.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._return_s: list[float] = []

    def refuse(self, num_waiting: int, over_per_s: float) -> float:
        """Return the seconds after which a sample that is refused now may come back.

        Args:
            num_waiting: Samples of its priority that wait.
            over_per_s: Samples that ended per second lately; 0 if none has.
        """
        now_s = self._clock()
        while self._return_s and self._return_s[0] <= now_s:
            heapq.heappop(self._return_s)
        before = num_waiting + len(self._return_s) / RETURNS_PER_ROW
        estimated_s = before / over_per_s if over_per_s else MIN_RETRY_S
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, estimated_s))
        if len(self._return_s) < MOST_RETURNS:
            heapq.heappush(self._return_s, now_s + retry_s)
        return retry_s


class HostLoop:
    """Steps the engines of all lines in turn."""

    def __init__(self, limits: HostLimits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self.changed = threading.Condition()
        self.idle: IdleWindow = lambda cause: nullcontext()
        self.lines: dict[str, HostLine] = {}
        self.waiting = WaitingSamples(limits)
        self.commands = deque[Callable[[], None]]()
        self.calls: set[Future[Any]] = set()
        """Calls that have not ended."""
        self.figures = HostFigures(clock)
        self.num_live = 0
        """Samples that wait or are in an engine."""
        self.next_deadline_s = math.inf
        """No deadline of a sample is before this time."""
        self.pause: Pause = "off"
        self._pausing: list[Future[None]] = []
        """Futures of `pause_after_running` that have not ended."""
        self.is_ending = self.is_closing = False
        self.error: BaseException | None = None
        self._turn = 0

    # --- for other threads, and under the lock

    def check_alive(self) -> None:
        """Check that the thread runs.

        Raises:
            RuntimeError: It has died.
            HostEnding: The host was closed.
        """
        if self.error is not None:
            raise RuntimeError(f"the engine's thread has died: {self.error!r}") from self.error
        if self.is_closing:
            raise HostEnding("the server is ending and takes no samples")

    def line(self, name: str) -> HostLine:
        """Return a line.

        Raises:
            LineClosed: There is none of this name.
        """
        found = self.lines.get(name)
        if found is None:
            known = ", ".join(map(repr, self.lines)) or "none"
            raise LineClosed(f"there is no line {name!r}; open lines: {known}")
        return found

    def do(self, command: Callable[[], None]) -> None:
        """Let the thread run a command between two steps."""
        with self.changed:
            self.check_alive()
            self.commands.append(command)
            self.changed.notify_all()

    def set_pause(self, pause: Pause) -> None:
        """Stop or go on. What `pause_after_running` has returned fails."""
        with self.changed:
            self.pause = pause
            replaced, self._pausing = self._pausing, []
            self.changed.notify_all()
        what = "resumed" if pause == "off" else "paused in another way"
        for done in replaced:
            settle(done, PauseReplaced(f"the server was {what} before the running samples had ended"))

    def pause_after_running(self) -> Future[None]:
        """Start no further samples; return a future that ends when none runs."""
        done: Future[None] = Future()
        with self.changed:
            self.check_alive()
            self.pause = "wait"
            self._pausing.append(done)
            self.changed.notify_all()
        return done

    def forget(self, ticket: HostTicket) -> None:
        """Take note that a sample is over."""
        with self.changed:
            self.num_live -= 1
            self.figures.num_over += 1
            if not self.num_live:
                self.changed.notify_all()

    def _is_ready(self, line: HostLine, priority: Priority) -> bool:
        """Return true if a waiting sample of this priority can start."""
        version = line.engine.version
        return bool(self.waiting.first(line.name, priority, 1, lambda t: t.min_version <= version))

    def _is_busy(self, line: HostLine) -> bool:
        if self.pause != "off":
            return self.pause == "wait" and line.is_running
        return line.is_busy or any(self._is_ready(line, each) for each in Priority)

    def _has_run_samples(self, line: HostLine) -> bool:
        return line.has_run_samples or self._is_ready(line, Priority.RUN)

    # --- the thread

    def run(self) -> None:
        """Step until `is_closing`, or until an error of which no single sample is the cause."""
        try:
            while not self.is_closing:
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
        if self.commands:
            while self.commands:
                self.commands.popleft()()
            self._update_figures()
        for line in self._with_new_weights():
            line.take_over_weights()
            with self.changed:
                self.figures.update(line)

    def _update_figures(self, *, now: bool = False) -> None:
        """Update the figures of all lines: also those that do not step may have fewer samples than before."""
        with self.changed:
            for line in self.lines.values():
                self.figures.update(line, now=now)

    def _with_new_weights(self) -> list[HostLine]:
        with self.changed:
            return [line for line in self.lines.values() if line.weights.is_prepared]

    def _next_line(self) -> HostLine | None:
        """Return the line whose turn it is; None if no line has work."""
        with self.changed:
            busy = list(filter(self._is_busy, self.lines.values()))
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
        with self.changed:
            starts = self.pause != "wait"
            chosen = line.choose(self.waiting) if starts else []
            for ticket in chosen:
                self.waiting.remove(ticket)
        evicted = line.evict(len(chosen))
        with self.changed:
            for ticket in evicted:
                self.waiting.put_first(ticket)
        line.start(chosen)
        line.step(starts=starts)
        with self.changed:
            self.figures.update(line)

    def _end_pausing(self) -> None:
        """End the futures of `pause_after_running` if nothing runs and no command waits."""
        with self.changed:
            if self.commands or self.pause != "wait" or any(map(self._is_busy, self.lines.values())):
                return
            ended, self._pausing = self._pausing, []
        for done in ended:
            settle(done, None)

    def _wait(self) -> None:
        """Wait for work, a command, or the next deadline."""
        until_s = self.next_deadline_s

        def has_news() -> bool:
            if self.is_closing or self.commands or self._pausing or self.next_deadline_s < until_s:
                return True
            if any(line.weights.is_prepared for line in self.lines.values()):
                return True
            return any(map(self._is_busy, self.lines.values()))

        cause = "weights" if self.num_live else "no requests"
        with self.idle(cause) if self.pause == "off" else nullcontext(), self.changed:
            self.changed.wait_for(has_news, min(MAX_WAIT_S, max(0.0, until_s - self.clock())))

    def _expire(self) -> None:
        """Let samples fail whose deadline has passed."""
        now_s = self.clock()
        if now_s < self.next_deadline_s:
            return
        with self.changed:
            live = [*self.waiting, *(each for line in self.lines.values() for each in line.tickets.values())]
            self.next_deadline_s = min((t.deadline_s for t in live if t.deadline_s > now_s), default=math.inf)
        for ticket in live:
            if ticket.deadline_s <= now_s:
                self._take(ticket).fail(ticket, DeadlinePassed("the sample was not finished in time"))
        self._update_figures()

    def _take(self, ticket: HostTicket) -> HostLine:
        """Remove a sample from the waiting ones, if it is there, and return its line."""
        with self.changed:
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            return self.lines[ticket.line]

    # --- commands

    def cancel(self, ticket: HostTicket) -> None:
        """End a sample, unless it is over."""
        if not ticket.is_over:
            self._take(ticket).abort(ticket)

    def abort_all(self, name: str | None) -> None:
        """End the samples of a line, or of all."""
        for ticket in self._tickets(name):
            self._take(ticket).abort(ticket)

    def _tickets(self, name: str | None = None) -> list[HostTicket]:
        """Return the waiting and running samples of a line, or of all."""
        with self.changed:
            running = [each for line in self.lines.values() for each in line.tickets.values()]
            return [each for each in [*running, *self.waiting] if name in (None, each.line)]

    def close_line(self, name: str, error: Exception | None = None) -> None:
        """Remove a line; its samples fail."""
        reason = error or LineClosed(f"line {name!r} was closed")
        with self.changed:
            line = self.lines.pop(name, None)
            waiting = [ticket for ticket in self.waiting if ticket.line == name]
            for ticket in waiting:
                self.waiting.remove(ticket)
            self.figures.forget(name)
        if line is None:
            return
        for ticket in [*line.tickets.values(), *waiting]:
            line.fail(ticket, reason)
        for _, done in line.scorings:
            settle(done, reason)
        line.engine.close()
        with self.changed:
            line.weights.close(reason)

    def call(self, name: str, function: Callable[[Engine], T], done: Future[T]) -> None:
        """Call a function with the engine of a line."""
        try:
            with self.changed:
                line = self.line(name)
            result = function(line.engine)
            with self.changed:
                self.figures.update(line)
        except Exception as error:
            settle(done, error)
        else:
            settle(done, None, result)
        self.calls.discard(done)

    def _end_all(self, error: Exception) -> None:
        with self.changed:
            names = list(self.lines)
            self.commands.clear()
            pausing, self._pausing = self._pausing, []
            self.changed.notify_all()
        for name in names:
            self.close_line(name, error)
        for done in (*self.calls, *pausing):
            settle(done, error)
        self.calls.clear()
