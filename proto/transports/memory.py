"""Nodes that are threads of one process: for tests, simulations and as the model of every other transport."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition
from typing import TypeVar

import torch
from torch import Tensor

from aedit.clock import Turns
from aedit.proto.transports.transport import ChannelNames, Mean, Once, Pending, Rows
from aedit.types import PositiveFloat, PositiveInt, checked

T = TypeVar("T")


@dataclass(slots=True)
class _Meeting:
    """Contributions to one key. Closed once: all nodes, also late ones, get the same answer."""

    given: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    closed: bool = False


@checked()
class MemoryWorld:
    """The nodes of one process.

    A key is answered when every member has contributed to it, or when the first of them has waited
    `timeout_s`; then the answer is over those that have.
    """

    def __init__(self, nodes: PositiveInt, *, timeout_s: PositiveFloat = 60.0) -> None:
        self.timeout_s = timeout_s
        self._members = set(range(nodes))
        self._meetings: dict[str, _Meeting] = {}
        self._notes: dict[str, str] = {}
        self._channels: dict[tuple[int, str], ChannelNames] = defaultdict(ChannelNames)
        self._changed = Condition()

    def node(self, index: int) -> "MemoryTransport":
        """Return the transport of node `index`."""
        return MemoryTransport(self, index)

    def give(self, node: int, key: str, value: Tensor, weight: float) -> _Meeting:
        """Contribute `value` to `key`."""
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting())
            if meeting.closed:
                meeting.late.add(node)
            else:
                for other, (theirs, _) in meeting.given.items():
                    if theirs.shape != value.shape:
                        shapes = f"{tuple(value.shape)}, where node {other} has brought {tuple(theirs.shape)}"
                        raise ValueError(f"{key}: shape {shapes}")
                meeting.given[node] = (value, weight)
            self._close_complete()
            return meeting

    def channel(self, node: int, parent: str, name: str | None) -> str:
        """Return the prefix of the next channel that `node` makes of the channel with prefix `parent`."""
        with self._changed:
            mine = self._channels[node, parent]
            made = mine.add(name)
            place = len(mine.names) - 1
            others = [(n, c.names) for (n, p), c in self._channels.items() if p == parent]
            mine.compare({n: names[place] for n, names in others if len(names) > place}, node)
            return f"{parent}{made}/"

    def enter(self, node: int) -> None:
        """Wait for this node from now on: it had left and is back."""
        with self._changed:
            self._members.add(node)

    def leave(self, node: int) -> None:
        """Do not wait for this node any more."""
        with self._changed:
            self._members.discard(node)
            self._close_complete()

    def wait(self, meeting: _Meeting, deadline: float) -> None:
        """Wait until the key is answered, or close it at the deadline."""
        with self._changed:
            while not meeting.closed and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            meeting.closed = True

    def post(self, key: str, text: str) -> None:
        """See `Transport.post`."""
        self._notes.setdefault(key, text)

    def read(self, key: str) -> str | None:
        """See `Transport.read`."""
        return self._notes.get(key)

    def _close_complete(self) -> None:
        for key, meeting in list(self._meetings.items()):
            meeting.closed |= self._members <= meeting.given.keys()
            if meeting.closed and self._members <= meeting.given.keys() | meeting.late:
                del self._meetings[key]
        self._changed.notify_all()


class MemoryTransport:
    """One thread's end of a `MemoryWorld`. prefix: begins all its keys."""

    def __init__(self, world: MemoryWorld, node: int, prefix: str = "") -> None:
        self.world = world
        self.node = node
        self.prefix = prefix
        self._bytes_sent = 0
        self._channels: list[MemoryTransport] = []

    @property
    def bytes_sent(self) -> int:
        """See `Transport.bytes_sent`."""
        return self._bytes_sent + sum(channel.bytes_sent for channel in self._channels)

    def channel(self, name: str | None = None) -> "MemoryTransport":
        """See `Transport.channel`. Does not wait: of two nodes whose names differ, the second one raises."""
        prefix = self.world.channel(self.node, self.prefix, name)
        self._channels.append(MemoryTransport(self.world, self.node, prefix))
        return self._channels[-1]

    def gather(self, key: str, row: Tensor) -> Pending[Rows]:
        """See `Transport.gather`."""

        def rows(meeting: _Meeting) -> Rows:
            nodes = sorted(meeting.given)
            mine = nodes.index(self.node) if self.node in meeting.given else None
            return Rows(torch.stack([meeting.given[n][0] for n in nodes]), mine)

        return self._give(key, row.detach().to("cpu", torch.float64, copy=True), 1.0, rows)

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> Pending[Mean]:
        """See `Transport.weighted_mean`."""

        def mean(meeting: _Meeting) -> Mean:
            total = torch.tensor(sum(w for _, w in meeting.given.values()), dtype=torch.float32)
            mixed = torch.zeros_like(value)
            for node in sorted(meeting.given):  # one order everywhere: equal bits on all nodes
                v, w = meeting.given[node]
                mixed.add_(v, alpha=w)
            return Mean(mixed / total if total > 0 else mixed, total)

        w = float(weight)
        sent = value.detach().clone() if w > 0 else torch.zeros_like(value)
        return self._give(key, sent, w, mean)

    def _give(self, key: str, value: Tensor, weight: float, read: Callable[[_Meeting], T]) -> Pending[T]:
        self._bytes_sent += value.numel() * value.element_size()
        meeting = self.world.give(self.node, self.prefix + key, value, weight)
        deadline = time.monotonic() + self.world.timeout_s

        def answer() -> T:
            self.world.wait(meeting, deadline)
            return read(meeting)

        return Once(lambda: meeting.closed, answer)

    def post(self, key: str, text: str) -> None:
        """See `Transport.post`."""
        self.world.post(self.prefix + key, text)

    def read(self, key: str) -> str | None:
        """See `Transport.read`."""
        return self.world.read(self.prefix + key)

    def close(self) -> None:
        """See `Transport.close`. A channel closes with the transport that it was made of."""
        if not self.prefix:
            self.world.leave(self.node)


@checked()
class VirtualTransport(MemoryTransport):
    """A memory transport in virtual time: a thread that waits lets those run that are behind."""

    def __init__(self, transport: MemoryTransport, turns: Turns) -> None:
        super().__init__(transport.world, transport.node, transport.prefix)
        self.turns = turns

    def channel(self, name: str | None = None) -> "VirtualTransport":
        """See `Transport.channel`."""
        made = VirtualTransport(super().channel(name), self.turns)
        self._channels[-1] = made
        return made

    def _give(self, key: str, value: Tensor, weight: float, read: Callable[[_Meeting], T]) -> Pending[T]:
        pending = super()._give(key, value, weight, read)
        self.turns.give(self.node, self.prefix + key)

        def answer() -> T:
            if not pending.done():
                self.turns.wait(self.node, self.prefix + key, pending.done)
            return pending.result()

        return Once(pending.done, answer)
