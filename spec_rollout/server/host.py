"""The thread that runs engines: samples come in from any thread, and their tokens go to receivers.

One thread steps the engines of all lines in turn. Everything that changes an engine (start, cancellation,
deadline, new weights) happens in this thread between two steps. Other threads touch only the waiting queue,
under a lock that is never held during a step.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, get_args

from torch import Tensor

from aedit.spec_rollout.engine import Engine, Scoring, check_prompt
from aedit.spec_rollout.sampling import Prompt
from aedit.spec_rollout.server.host_line import HostLine, LineWeights, NewWeights, OnNewVersion
from aedit.spec_rollout.server.host_loop import HostLoop, IdleWindow
from aedit.spec_rollout.server.tickets import (
    HostEnding,
    HostLimits,
    HostTicket,
    Overloaded,
    Priority,
    SampleReceiver,
)

T = TypeVar("T")


def _nothing() -> None:
    pass


class EngineHost:
    """Engines of several lines in one thread. All methods may be called from any thread."""

    def __init__(
        self, limits: HostLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread.

        Args:
            limits: Of waiting samples and lines.
            clock: Monotonic seconds, for deadlines and figures.
        """
        self.limits = limits or HostLimits()
        self._opening: set[str] = set()
        self._loop = HostLoop(self.limits, clock)
        self._thread = threading.Thread(target=self._loop.run, name="engine host", daemon=True)
        self._thread.start()

    # --- lines

    def open(
        self, line: str, make: Callable[[], Engine], *, between_steps: Callable[[], None] = _nothing
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
        with self._loop.changed:
            self._loop.check_alive()
            names = {*self._loop.lines, *self._opening}
            if line in names:
                raise ValueError(f"line {line!r} is open already: close it first, or choose another name")
            if len(names) >= self.limits.max_lines:
                raise ValueError(f"max_lines {self.limits.max_lines}: line {line!r} would be one more")
            self._opening.add(line)
        try:
            engine = make()
            weights = LineWeights(engine, self._loop.changed)
            made = HostLine(line, engine, between_steps, self._loop.forget, weights)
            with self._loop.changed:
                self._loop.check_alive()
                self._loop.lines[line] = made
                self._loop.figures.update(made)
        finally:
            with self._loop.changed:
                self._opening.discard(line)

    def close_line(self, line: str) -> None:
        """Remove a line; its samples fail. Does nothing if there is no such line."""
        self._loop.do(partial(self._loop.close_line, line))

    def lines(self) -> list[str]:
        """Return the names of the lines."""
        with self._loop.changed:
            return list(self._loop.lines)

    def engine(self, line: str) -> Engine:
        """Return the engine of a line, for its constants such as `target.max_tokens` and `version`.

        Raises:
            LineClosed: There is no such line.
        """
        with self._loop.changed:
            self._loop.check_alive()
            return self._loop.line(line).engine

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
    ) -> HostTicket:
        """Queue a sample. While another sample with the same ids is here, it waits for that one's end.

        Args:
            line: Whose policy generates.
            prompt: The sample.
            receiver: Gets its tokens and its end.
            priority: Samples of priority RUN come first, and take the rows of public ones.
            min_version: Policy version that the sample waits for.
            deadline_s: Seconds from now after which it fails with `DeadlinePassed`.

        Raises:
            ValueError: The engine of this line cannot serve the prompt.
            Overloaded: Too many samples wait.
            LineClosed: There is no such line.
            HostEnding: The host is ending.
            RuntimeError: The thread has died.
        """
        loop, engine = self._loop, self.engine(line)
        check_prompt(prompt, engine.target.vocabulary, engine.target.max_tokens, engine.tokenizer is not None)
        with loop.changed:
            loop.check_alive()
            if loop.is_ending:
                raise HostEnding("the server is ending and takes no samples")
            loop.line(line)
            until_s = math.inf if deadline_s is None else loop.clock() + deadline_s
            ticket = HostTicket(line, prompt, receiver, priority, min_version, until_s)
            loop.waiting.check_room(ticket, loop.figures.refuse)
            loop.waiting.append(ticket)
            loop.num_live += 1
            loop.next_deadline_s = min(loop.next_deadline_s, until_s)
            loop.changed.notify_all()
            return ticket

    def cancel(self, ticket: HostTicket) -> None:
        """End a sample between two steps: it ends with finish_reason "abort". Idempotent."""
        with suppress(RuntimeError):  # its thread has ended: so has the sample
            self._loop.do(partial(self._loop.cancel, ticket))

    def abort_all(self, line: str | None = None) -> None:
        """End all samples, of one line or of all, with finish_reason "abort"."""
        self._loop.do(partial(self._loop.abort_all, line))

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
        loop = self._loop
        done: Future[Scoring] = Future()
        with loop.changed:
            loop.check_alive()
            if loop.is_ending:
                raise HostEnding("the server is ending and takes no texts")
            queue, most = loop.line(line).scorings, self.limits.max_waiting_public
            if len(queue) >= most:
                message = f"max_waiting_public {most}: so many texts wait already"
                raise Overloaded(message, loop.figures.refuse(len(queue)))
            queue.append((scoring, done))
            loop.changed.notify_all()
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
        with self._loop.changed:
            self._loop.check_alive()
            self._loop.line(line).weights.add(new)
        return new.done

    def call(self, line: str, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine of a line between two steps; return a future of its result."""
        done: Future[T] = Future()
        with self._loop.changed:
            self._loop.line(line)
            self._loop.do(partial(self._loop.call, line, function, done))
            self._loop.calls.add(done)
        return done

    # --- state

    @property
    def idle(self) -> IdleWindow:
        """Return the context manager that the thread enters while it has no work; see `IdleWork.window`."""
        return self._loop.idle

    @idle.setter
    def idle(self, window: IdleWindow) -> None:
        self._loop.idle = window

    def pause(self) -> None:
        """Stop stepping after the current step. Samples stay where they are; new ones are queued."""
        self._loop.set_pause("keep")

    def pause_after_running(self) -> Future[None]:
        """Start no further samples; those that run go on to their ends, and the others are queued.

        Returns:
            A future that ends when no sample runs, or with `PauseReplaced` if `resume` or `pause` is called
            before.
        """
        return self._loop.pause_after_running()

    def resume(self) -> None:
        """Go on after `pause` or `pause_after_running`."""
        self._loop.set_pause("off")

    @property
    def is_paused(self) -> bool:
        """Return true from `pause` or `pause_after_running` on until `resume`."""
        return self._loop.pause != "off"

    @property
    def error(self) -> BaseException | None:
        """Return the error of which the thread has died, else None."""
        return self._loop.error

    def status(self) -> dict[str, Any]:
        """Return counts, speed and queue lengths.

        `lines` has `Engine.status` of each line as it was a fraction of a second ago.
        """
        loop = self._loop
        with loop.changed:
            counts: dict[str, Any] = {}
            for each in Priority:
                name = each.name.lower()
                counts[f"waiting_{name}"] = loop.waiting.count(each)
                counts[f"waiting_{name}_tokens"] = loop.waiting.num_tokens(each)
            return {
                "samples": loop.num_live,
                **counts,
                "paused": loop.pause != "off",
                "ending": loop.is_ending,
                "error": "" if loop.error is None else repr(loop.error),
                **loop.figures.status(),
            }

    def drain(self, timeout_s: float) -> bool:
        """Take no further samples, and wait for those that are here; return whether all are over."""
        loop = self._loop
        with loop.changed:
            loop.is_ending = True
            return loop.changed.wait_for(lambda: not loop.num_live or loop.error is not None, timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread after the current step. Samples that are here fail with `HostEnding`.

        Raises:
            TimeoutError: The current step has not ended in time.
        """
        loop = self._loop
        with loop.changed:
            loop.is_ending = loop.is_closing = True
            loop.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine's current step has not ended within {timeout_s:g} s")
