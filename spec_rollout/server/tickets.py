"""Samples in the hands of an `EngineHost`: receivers, priorities, limits, and the queues of waiting ones."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from aedit import traces
from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.types import check


class Priority(IntEnum):
    """Order in which samples get rows and steps."""

    RUN = 0
    """Samples of a training run; they take the rows of public ones."""
    PUBLIC = 1


class SampleReceiver(Protocol):
    """Receives what becomes of a sample.

    All methods are called in the engine's thread and must return at once. Exactly one of `ended` and `failed`
    is called, and nothing after it.
    """

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Take note that rollout.tokens[start:] are new, and their log-probabilities and versions.

        The lists only grow. A sample that has given up its row in between comes with another object, whose
        lists begin with the same tokens.
        """

    def ended(self, rollout: Rollout) -> None:
        """Take the rollout, whose finish_reason is set: stop, length, or abort if it was cancelled."""

    def failed(self, error: Exception) -> None:
        """Take the reason for which the sample has no end."""


class Overloaded(Exception):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Estimated seconds until the queue has room again."""


class HostEnding(RuntimeError):
    """The host is ending and takes no samples."""


class PauseReplaced(RuntimeError):
    """The host was resumed, or paused in another way, before the running samples had ended."""


class DeadlinePassed(TimeoutError):
    """The sample was not finished at its deadline."""


class LineClosed(LookupError):
    """There is no line of this name, or it was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Limits of an `EngineHost`."""

    max_waiting_run: int = 1024
    """Upper limit of waiting samples of priority RUN, over all lines."""
    max_waiting_public: int = 256
    """The same of priority PUBLIC."""
    max_waiting_tokens: int = 1 << 20
    """Upper limit of the tokens of prompts, and of answers that samples bring along, that wait, for each
    priority."""
    max_lines: int = 8
    public_every: int = 8
    """While lines have samples of priority RUN, lines that have none of these get one step in so many."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))

    def max_waiting(self, priority: Priority) -> int:
        """Return the upper limit of waiting samples of this priority."""
        return self.max_waiting_run if priority is Priority.RUN else self.max_waiting_public


@dataclass(slots=True, eq=False)
class HostTicket:
    """A submitted sample. Its fields belong to the host; others pass it to `EngineHost.cancel`."""

    line: str
    prompt: Prompt
    """With a partial rollout, if the sample has given up its row."""
    receiver: SampleReceiver
    priority: Priority
    min_version: int
    """The sample starts with this policy version or a newer one."""
    deadline_s: float
    """Time on the host's clock, infinite without a deadline."""
    rollout: Rollout | None = None
    """Its rollout in the engine; None while the sample waits."""
    is_over: bool = False
    """`ended` or `failed` was called, or will be in this step."""
    span: traces.TraceSpan = traces.OFF
    """From its submission to its end."""
    queued: traces.TraceSpan = traces.OFF
    """While it waits for a row; below `span`."""
    num_given: int = 0
    """Tokens of the answer that it has brought along, of a sample that is traced."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens that wait with it."""
        partial = self.prompt.partial
        return len(self.prompt.tokens) + (len(partial.tokens) if partial else 0)

    def trace(self, parent: traces.TraceContext | None) -> None:
        """Begin its spans, below a span of its client or else below that of the block."""
        self.span = traces.opened("server: generate", parent, sample=self.prompt.sample)
        self.num_given = len(self.prompt.partial.tokens) if self.prompt.partial else 0
        self.queue()

    def queue(self) -> None:
        """Begin a wait for a row."""
        if self.span.context is not None:
            self.queued = traces.opened("server: queue", self.span.context)

    def end_spans(self, rollout: Rollout | None = None, error: Exception | None = None) -> None:
        """End its spans with the rollout, or with the reason for which it has none."""
        self.queued.end()
        if rollout is not None:
            num_new, version = len(rollout.tokens) - self.num_given, max(rollout.versions, default=0)
            self.span.end(tokens=num_new, version=version, finish=rollout.finish_reason or "")
        else:
            self.span.end(error=type(error).__name__)


class WaitingSamples:
    """Waiting samples by line and priority, in the order in which they came."""

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._queues: dict[tuple[str, Priority], OrderedDict[HostTicket, None]] = {}
        self._num_samples = dict.fromkeys(Priority, 0)
        self._num_tokens = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return sum(self._num_samples.values())

    def __iter__(self) -> Iterator[HostTicket]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, ticket: HostTicket) -> bool:
        return ticket in self._queues.get((ticket.line, ticket.priority), ())

    def count(self, priority: Priority, line: str | None = None) -> int:
        """Return the number of waiting samples of a priority, of one line or of all."""
        if line is None:
            return self._num_samples[priority]
        return len(self._queues.get((line, priority), ()))

    def num_tokens(self, priority: Priority) -> int:
        """Return the tokens of the waiting samples of a priority."""
        return self._num_tokens[priority]

    def check_room(self, ticket: HostTicket, retry_after_s: Callable[[int], float]) -> None:
        """Check that the limits allow one more sample.

        Args:
            ticket: The sample.
            retry_after_s: Called with the number of waiting samples if the sample is refused; returns the
                seconds after which it may come back.

        Raises:
            Overloaded: They do not.
        """
        priority, limits = ticket.priority, self._limits
        num_samples = self._num_samples[priority]
        num_tokens = self._num_tokens[priority] + ticket.num_tokens
        if num_samples >= limits.max_waiting(priority):
            limit = f"max_waiting_{priority.name.lower()} {limits.max_waiting(priority)}"
            raise Overloaded(f"{limit}: so many samples wait already", retry_after_s(num_samples))
        if num_tokens > limits.max_waiting_tokens and num_samples:
            limit = f"max_waiting_tokens {limits.max_waiting_tokens}"
            raise Overloaded(f"{limit}: {num_tokens} tokens would wait", retry_after_s(num_samples))

    def append(self, ticket: HostTicket) -> None:
        """Add a sample as the last one."""
        self._queues.setdefault((ticket.line, ticket.priority), OrderedDict())[ticket] = None
        self._count(ticket, 1)

    def put_first(self, ticket: HostTicket) -> None:
        """Add a sample as the first one. The limits do not apply: it had a row."""
        self.append(ticket)
        self._queues[ticket.line, ticket.priority].move_to_end(ticket, last=False)

    def remove(self, ticket: HostTicket) -> None:
        """Remove a waiting sample."""
        queue = self._queues[ticket.line, ticket.priority]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.line, ticket.priority]
        self._count(ticket, -1)

    def first(
        self, line: str, priority: Priority, most: int, fits: Callable[[HostTicket], bool]
    ) -> list[HostTicket]:
        """Return the first waiting samples of a line that fit now."""
        found: list[HostTicket] = []
        for ticket in self._queues.get((line, priority), ()):
            if len(found) >= most:
                break
            if fits(ticket):
                found.append(ticket)
        return found

    def _count(self, ticket: HostTicket, sign: int) -> None:
        self._num_samples[ticket.priority] += sign
        self._num_tokens[ticket.priority] += sign * ticket.num_tokens
