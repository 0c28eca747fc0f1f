"""Transfers of one unit that continue after a cut: downloads of anchors and uploads of pushes.

A download continues at the byte where it ended, from any sender; an upload after the last whole chunk that
the hub has.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc.limits import ByteBudget
from aedit.proto.rpc.retry import HubRefused, Refusal, TransferBroken

_MAX_WRONG = 3
"""Complete answers with another hash than they say, after which the sender is no good."""


class Download:
    """Collects the answer to `request` in `into`, from one sender after another.

    into: writable bytes with room for the largest answer. If request.offset is above 0, so many bytes of the
    answer of request.version are in `into` already.
    """

    def __init__(self, request: hub_pb2.PullRequest, into: memoryview) -> None:
        self._asked = request
        self._into = into.cast("B")
        self._head: hub_pb2.PullHead | None = None
        self._hash = hashlib.sha256()
        self._wrong = 0
        self.received = request.offset
        """Bytes from the start that are there and checked."""
        self.num_bytes = 0
        """Bytes that have arrived, also those that have arrived twice."""

    @property
    def room_bytes(self) -> int:
        """Return the room in `into`."""
        return self._into.nbytes

    @property
    def request(self) -> hub_pb2.PullRequest:
        """Return the request for the next sender."""
        wanted = hub_pb2.PullRequest()
        wanted.CopyFrom(self._asked)
        wanted.offset = self.received
        if self._head is not None:
            wanted.version = self._head.version
        return wanted

    def take(self, messages: Iterator[bytes], moved: Callable[[int], None]) -> hub_pb2.PullHead:
        """Take one sender's answer to `request`, up to its end; `moved` is called with bytes that arrived.

        Raises TransferBroken if it ends early or is damaged, and keeps what was right; HubRefused if it
        can never succeed.
        """
        try:
            assembly = None
            for message in messages:
                chunk = frames.unpack_chunk(message)
                if assembly is None:
                    chunk.check()
                    assembly = self._begin(hub_pb2.PullHead.FromString(bytes(chunk.head)), chunk.offset)
                assembly.add(chunk)
                self._hash.update(chunk.data)
                self.received = assembly.received
                self.num_bytes += len(message)
                moved(len(message))
            if assembly is None or assembly.received < assembly.num_bytes:
                raise TransferBroken(f"the answer ended after {self.received} bytes")
        except (ValueError, DecodeError) as error:
            raise TransferBroken(str(error)) from error
        assert self._head is not None
        if self._hash.digest() == self._head.sha256:
            return self._head
        text = f"version {self._head.version} is not what its SHA-256 says"
        self._restart()
        self._wrong += 1
        if self._wrong == _MAX_WRONG:
            raise HubRefused(grpc.StatusCode.DATA_LOSS, text)
        raise TransferBroken(text)

    def _begin(self, head: hub_pb2.PullHead, offset: int) -> frames.Assembly:
        room = self.room_bytes
        if head.num_bytes > room:
            raise HubRefused(
                grpc.StatusCode.DATA_LOSS, f"an answer of {head.num_bytes} bytes, where {room} have room"
            )
        known = self._head
        goes_on = head.version == self._asked.version if known is None else _content(head) == _content(known)
        if offset and (offset != self.received or not goes_on):
            self._restart()
            raise TransferBroken(f"the answer starts at byte {offset} of something else")
        if offset == 0 or self._head is None:
            self._hash = hashlib.sha256(self._into[:offset])
        self._head, self.received = head, offset
        return frames.Assembly(head.num_bytes, limit_bytes=room, into=self._into, offset=offset)

    def _restart(self) -> None:
        self._head, self.received = None, 0


def _content(head: hub_pb2.PullHead) -> hub_pb2.PullHead:
    """Return what a head says of the bytes. Other nodes sign nothing, and hubs sign anew in each term."""
    copy = hub_pb2.PullHead()
    copy.CopyFrom(head)
    copy.ClearField("statement")
    return copy


KEPT_S = 120.0
"""How long a hub keeps a push that has broken off."""

_Key = tuple[int, int, int]
"""Part, node and unit."""


class PrefixHash:
    """SHA-256 of the first bytes of one array; a longer prefix costs only the bytes that it adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hash, self._num_bytes = hashlib.sha256(), 0

    def digest(self, data: memoryview, num_bytes: int) -> bytes:
        """Return the hash of `data[:num_bytes]`; `data` is the same array in every call."""
        with self._lock:
            if num_bytes < self._num_bytes:
                self._hash, self._num_bytes = hashlib.sha256(), 0
            self._hash.update(data[self._num_bytes : num_bytes])
            self._num_bytes = num_bytes
            return self._hash.digest()

    def resume_at(self, data: memoryview, there: hub_pb2.PartialPush) -> int:
        """Return the byte to send from: 0 unless what the hub has is the beginning of the data."""
        if not 0 < there.num_bytes <= data.nbytes:
            return 0
        return there.num_bytes * (self.digest(data, there.num_bytes) == there.sha256)


class Arrival(frames.Assembly):
    """Takes the bytes of a push that one call brings, until another call continues the push."""

    def __init__(self, push: "_Push", offset: int) -> None:
        super().__init__(push.data.nbytes, limit_bytes=push.data.nbytes, into=push.data, offset=offset)
        self.push = push

    def add(self, chunk: frames.Chunk) -> None:
        """Take the next chunk. Raises ArrayIncomplete if another call continues the push."""
        with self.push.lock:
            if self.push.arrival is not self:
                raise frames.ArrayIncomplete("another call continues this push")
            super().add(chunk)
            self.push.received = self.received


@dataclass(eq=False, slots=True)
class _Push:
    """A push of which a part is here."""

    key: _Key
    head: hub_pb2.PushHead
    """Without session, report and use: a node that has joined again continues its pushes."""
    num_bytes: int
    """Counted in the budget; 0 once they are given back."""
    data: memoryview
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held to change what follows."""
    received: int = 0
    arrival: Arrival | None = None
    """The call that brings it; None: it has broken off, or is complete."""
    prefix: PrefixHash = field(default_factory=PrefixHash)
    num_calls: int = 0
    """Calls that have not ended and hold its bytes."""
    broken_s: float = 0.0


class PartialPushes:
    """Pushes that arrive at a hub. One that breaks off is kept for `KEPT_S`, one per node and unit.

    Together they take no more than `budget`: broken ones are dropped where a new push needs room, first those
    of the node that has most. Any thread may call. The core has authenticated the node of each head.
    """

    def __init__(self, budget: ByteBudget, clock: Callable[[], float] = monotonic) -> None:
        self._budget, self._clock = budget, clock
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Push] = {}

    def find(self, head: hub_pb2.PushHead) -> hub_pb2.PartialPush:
        """Return how much of this push is here. A call that still brings it is superseded."""
        key, same = _identity(head)
        with self._lock:
            push = self._kept.get(key)
            if push is None or push.head != same:
                return hub_pb2.PartialPush()
            with push.lock:
                push.arrival, push.broken_s = None, self._clock()
                data, received = push.data, push.received
        return hub_pb2.PartialPush(num_bytes=received, sha256=push.prefix.digest(data, received))

    def begin(self, head: hub_pb2.PushHead, offset: int, limit_bytes: int) -> Arrival:
        """Return what takes a push from byte `offset` on; `end` must follow.

        Raises ValueError if the push is larger than `limit_bytes`, ArrayIncomplete if its first bytes are not
        here, Refusal if too many bytes are on their way.
        """
        key, same = _identity(head)
        if head.num_bytes > limit_bytes:
            raise ValueError(f"{head.num_bytes} bytes declared, at most {limit_bytes} are allowed")
        with self._lock:
            push = self._kept.get(key)
            if offset == 0:
                if push is not None:
                    self._drop(push)
                self._reserve(head.num_bytes)
                # Not zeroed: memory is taken only as data arrives.
                push = _Push(key, same, head.num_bytes, np.empty(head.num_bytes, np.uint8).data)
                self._kept[key] = push
            elif push is None or push.head != same or offset > push.received:
                raise frames.ArrayIncomplete(f"starts at byte {offset} of a push of which less is here")
            with push.lock:
                push.received, push.arrival = offset, Arrival(push, offset)
                push.num_calls += 1
                return push.arrival

    def complete(self, arrival: Arrival) -> None:
        """Keep the push no longer, whose data the core owns from now on; its bytes count until `end`.

        Raises ArrayIncomplete if another call continues the push, which could change the data.
        """
        push = arrival.push
        with self._lock, push.lock:
            if push.arrival is not arrival:
                raise frames.ArrayIncomplete("another call continues this push")
            push.arrival, push.data = None, memoryview(b"")
            self._drop(push)

    def end(self, arrival: Arrival, *, keeps: bool) -> bool:
        """Note that the call has ended; return whether the push is kept, which it is only with `keeps`."""
        push = arrival.push
        with self._lock:
            push.num_calls -= 1
            if push.arrival is arrival:
                push.arrival, push.broken_s = None, self._clock()
                if not (keeps and push.received):
                    self._drop(push)
            self._give_back(push)
            return self._kept.get(push.key) is push

    def expire(self) -> None:
        """Drop what has broken off long ago."""
        with self._lock:
            until_s = self._clock() - KEPT_S
            for push in [p for p in self._kept.values() if p.arrival is None and p.broken_s <= until_s]:
                self._drop(push)

    # --- the lock is held

    def _drop(self, push: _Push) -> None:
        if self._kept.get(push.key) is push:
            del self._kept[push.key]
            self._give_back(push)

    def _give_back(self, push: _Push) -> None:
        """Return the bytes to the budget when neither a call nor this object holds them."""
        if push.num_calls == 0 and self._kept.get(push.key) is not push:
            self._budget.give(push.num_bytes)
            push.num_bytes = 0

    def _reserve(self, num_bytes: int) -> None:
        broken = [p for p in self._kept.values() if p.arrival is None and p.num_calls == 0]
        if not self._budget.fits(num_bytes, freed=sum(push.num_bytes for push in broken)):
            broken = []
        of_node: Counter[tuple[int, int]] = Counter()
        for push in broken:
            of_node[push.key[:2]] += push.num_bytes
        while not self._budget.take(num_bytes):
            if not broken:
                raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, self._budget.full)
            first = max(broken, key=lambda push: (of_node[push.key[:2]], -push.broken_s))
            broken.remove(first)
            of_node[first.key[:2]] -= first.num_bytes
            self._drop(first)


def _identity(head: hub_pb2.PushHead) -> tuple[_Key, hub_pb2.PushHead]:
    same = hub_pb2.PushHead()
    same.CopyFrom(head)
    same.who.ClearField("session")
    same.ClearField("report")
    same.ClearField("consumed")
    return (head.who.part, head.who.node, head.unit), same
