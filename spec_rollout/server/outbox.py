"""Messages that wait to be sent to one trainer: bounded, and never in the way of the engine.

The engine's thread adds tokens as they are drawn. What one sample gets until the next message is sent is one
message.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from aedit.spec_rollout.sampling import TopLogprobs

GATHER_S = 0.02
"""Time over which tokens are gathered, so that a step costs no message of its own."""
TOKEN_BYTES = 32
ITEM_BYTES = 256
"""Memory that a token, and a message, are counted with."""

SampleKey = tuple[int, int]


@dataclass(slots=True)
class TokenRun:
    """Tokens of one sample that follow each other."""

    key: SampleKey
    start: int
    """Place of the first one in the answer."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def parts(self, most: int) -> Iterator["TokenRun"]:
        """Yield runs of at most so many tokens."""
        for i in range(0, len(self.tokens), most):
            part = slice(i, i + most)
            lists = self.tokens[part], self.logprobs[part], self.versions[part], self.top_logprobs[part]
            yield TokenRun(self.key, self.start + i, *lists)


Item = TokenRun | Callable[[], bytes]
"""Tokens to send, or a function that returns the message to send."""


class Outbox:
    """Queue with a limit in bytes. Adding never waits: beyond the limit the queue is full, and stays so."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._open: dict[SampleKey, TokenRun] = {}
        self._num_bytes = 0
        self._is_urgent = self._is_closed = False
        self._taken_s = clock() - GATHER_S
        self.is_full = False
        """More had to wait than the limit allows. What came later was dropped."""

    def add(self, key: SampleKey, message: Callable[[], bytes]) -> None:
        """Add a message about a sample, after all that was added before; it is made when it is sent."""
        with self._changed:
            if self._has_room(ITEM_BYTES):
                self._open.pop(key, None)
                self._items.append(message)
                self._is_urgent = True
                self._changed.notify_all()

    def add_tokens(self, new: TokenRun) -> None:
        """Add tokens, which are joined to those of the sample that wait."""
        num_top = sum(map(len, new.top_logprobs))
        with self._changed:
            if not self._has_room((len(new.tokens) + num_top) * TOKEN_BYTES + ITEM_BYTES):
                return
            run = self._open.get(new.key)
            if run is None:
                self._open[new.key] = new
                self._items.append(new)
            else:
                run.tokens += new.tokens
                run.logprobs += new.logprobs
                run.versions += new.versions
                run.top_logprobs += new.top_logprobs
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Sequence[Item]:
        """Return what waits, after up to `timeout_s` seconds; empty if that is nothing, or it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout_s)
            left_s = self._taken_s + GATHER_S - self._clock()
            if left_s > 0:
                self._changed.wait_for(lambda: self._is_urgent or self._is_closed, min(left_s, GATHER_S))
            items, self._items = self._items, []
            self._open.clear()
            self._num_bytes, self._is_urgent, self._taken_s = 0, False, self._clock()
            return [] if self._is_closed else items

    def close(self) -> None:
        """Drop what waits and all that is added later; end a wait in `take`."""
        with self._changed:
            self._is_closed = True
            self._items = []
            self._open.clear()
            self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        if self._is_closed or self.is_full:
            return False
        self._num_bytes += num_bytes
        self.is_full = self._num_bytes > self._limit_bytes
        return not self.is_full
