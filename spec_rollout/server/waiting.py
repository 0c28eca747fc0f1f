"""Queues of the samples that wait for a row, counted over all lines. Not thread-safe."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from aedit.spec_rollout.server.tickets import HostLimits, Overloaded, Priority, Ticket


class WaitingSamples:
    """Waiting samples by line and priority, in the order in which they came."""

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._queues: dict[tuple[str, Priority], OrderedDict[Ticket, None]] = {}
        self._num_samples = dict.fromkeys(Priority, 0)
        self._num_tokens = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return sum(self._num_samples.values())

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._queues.get((ticket.line, ticket.priority), ())

    def count(self, priority: Priority, line: str | None = None) -> int:
        """Return the number of waiting samples of a priority, of one line or of all."""
        if line is None:
            return self._num_samples[priority]
        return len(self._queues.get((line, priority), ()))

    def num_tokens(self, priority: Priority) -> int:
        """Return the tokens of the waiting samples of a priority."""
        return self._num_tokens[priority]

    def check_room(self, ticket: Ticket, retry_after_s: Callable[[int], float]) -> None:
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

    def append(self, ticket: Ticket) -> None:
        """Add a sample as the last one."""
        self._queues.setdefault((ticket.line, ticket.priority), OrderedDict())[ticket] = None
        self._count(ticket, 1)

    def put_first(self, ticket: Ticket) -> None:
        """Add a sample as the first one. The limits do not apply: it had a row."""
        self.append(ticket)
        self._queues[ticket.line, ticket.priority].move_to_end(ticket, last=False)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting sample."""
        queue = self._queues[ticket.line, ticket.priority]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.line, ticket.priority]
        self._count(ticket, -1)

    def first(self, line: str, priority: Priority, most: int, fits: Callable[[Ticket], bool]) -> list[Ticket]:
        """Return the first waiting samples of a line that fit now."""
        found: list[Ticket] = []
        for ticket in self._queues.get((line, priority), ()):
            if len(found) >= most:
                break
            if fits(ticket):
                found.append(ticket)
        return found

    def _count(self, ticket: Ticket, sign: int) -> None:
        self._num_samples[ticket.priority] += sign
        self._num_tokens[ticket.priority] += sign * ticket.num_tokens
