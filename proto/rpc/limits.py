"""Limits of a server for each peer: calls per second, bytes in flight, threads, open calls, stalled streams.

A stream has no deadline as a whole, which would have to be hours for an array of gigabytes, and keepalive
shows only that the peer's kernel runs. So `StallWatch` ends streams that stall.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc

from aedit.proto.rpc.frames import CHUNK_BYTES
from aedit.proto.rpc.retry import Refusal

_LEAST_WINDOW = 2**16 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server. The defaults are those of `HubConfig.limits`."""

    nodes: int = 256
    """Members at a time, which is also how many callers are counted separately per host."""
    calls_per_s: float = 200.0
    """Calls of one node, with bursts of as many."""
    in_flight_bytes: int = 2**30
    """Bytes of all pushes being received at a time."""
    connections: int = 1024
    """Connections of one host."""
    stall_s: float = 30.0
    """Time without a byte after which a stream is ended."""
    bytes_per_s: float = 4096.0
    """A stream that is slower than this on average is ended too."""

    silent_calls: int = 512
    """Open calls that have sent nothing yet."""

    @property
    def window_bytes(self) -> int:
        """Return how much a connection may send ahead of what is read.

        The connections of one host hold no more unread than `in_flight_bytes` together, but at least what
        HTTP/2 begins with.
        """
        return min(CHUNK_BYTES, max(_LEAST_WINDOW, self.in_flight_bytes // self.connections))

    @property
    def unread_uploads(self) -> int:
        """Return how many uploads may be read before it is known what they are: a quarter of the bytes."""
        return max(8, self.in_flight_bytes // 4 // CHUNK_BYTES)

    @property
    def unread_answers(self) -> int:
        """Return how many streams may wait for peers that do not read: a quarter of the bytes.

        gRPC holds up to two chunks of each.
        """
        return max(8, self.in_flight_bytes // 4 // (2 * CHUNK_BYTES))


class Rates:
    """A token bucket per key: `per_s` a second, bursts of as many. Remembers the `keys` latest."""

    def __init__(
        self, per_s: float, *, keys: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allow(self, key: Hashable) -> bool:
        """Take one of `key`'s tokens and return True, or return False if there is none."""
        with self._lock:
            now_s = self._clock()
            tokens, then_s = self._buckets.pop(key, (self._burst, now_s))
            tokens = min(self._burst, tokens + (now_s - then_s) * self._per_s)
            allowed = tokens >= 1
            self._buckets[key] = (tokens - allowed, now_s)
            while len(self._buckets) > self._keys:
                self._buckets.popitem(last=False)
        return allowed


USUAL_CALL_S = 1e-3
"""CPU time of a small call, as long as it is not measured; see `benchmarks.hub --only heartbeats`."""


class CallCost:
    """CPU time of this server per small call, as measured while it serves.

    The event loop's time is divided by the messages of all calls, the handlers' time by their calls. What
    does not grow with the calls, such as pings of connections, counts for nothing.
    """

    _OWN_THREADS = 1.3
    """Times these: gRPC's own threads take the rest."""
    _LEAST_MESSAGES = 50
    _NEWEST = 0.1
    """Weight of the newest measurement."""
    _RANGE = 0.2 * USUAL_CALL_S, 2.5 * USUAL_CALL_S
    """A hub that begins to lead knows nothing of what the last one measured: what they ask of nodes must not
    differ by more than a node may be late."""

    def __init__(self) -> None:
        self.call_s = USUAL_CALL_S
        self._messages = self._calls = 0
        self._work_s = 0.0
        self._before: tuple[float, int, float, int] | None = None
        self._lock = threading.Lock()

    def message(self) -> None:
        """Count a message, in or out; used by the event loop only."""
        self._messages += 1

    def work(self, handler: Callable[[], T]) -> T:
        """Return what the handler of a small call returns, and measure its thread meanwhile."""
        began_s = time.thread_time()
        try:
            return handler()
        finally:
            with self._lock:
                self._work_s += time.thread_time() - began_s
                self._calls += 1

    def measure(self, loop_s: float) -> None:
        """Take the measurement since the last one that had enough messages.

        loop_s: CPU time of the event loop's thread since any moment.
        """
        with self._lock:
            now = loop_s, self._messages, self._work_s, self._calls
        if self._before is None:
            self._before = now
        loop_s, messages, work_s, calls = (new - old for new, old in zip(now, self._before, strict=True))
        if messages < self._LEAST_MESSAGES:
            return
        self._before = now
        found_s = self._OWN_THREADS * (loop_s / messages + (work_s / calls if calls else 0.0))
        least_s, most_s = self._RANGE
        self.call_s += self._NEWEST * (min(most_s, max(least_s, found_s)) - self.call_s)


class ByteBudget:
    """Bytes that may be under way at a time. A single transfer is always allowed, however large it is."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self.taken = 0

    @property
    def full(self) -> str:
        """Return why there is no room, as text."""
        return f"{self.taken} bytes are on their way, at most {self._num_bytes} may be"

    def fits(self, num_bytes: int, *, freed: int = 0) -> bool:
        """Return whether there is room, once `freed` bytes are given back."""
        taken = self.taken - freed
        return taken == 0 or taken + num_bytes <= self._num_bytes

    def take(self, num_bytes: int) -> bool:
        """Reserve bytes and return True if there is room; then `give` must return them."""
        with self._lock:
            fits = self.fits(num_bytes)
            self.taken += num_bytes * fits
        return fits

    def give(self, num_bytes: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self.taken -= num_bytes


class FairTurns:
    """At most `places` are taken at a time. Peers take turns, however often each has asked.

    Used by the event loop only.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, peer: Hashable) -> int:
        """Return how many turns this peer has asked for and not got."""
        return len(self._waiting.get(peer, ()))

    def ask(self, peer: Hashable) -> "asyncio.Future[None]":
        """Return a future that is done when a place is the caller's, until `give` or `drop`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            turn.set_result(None)
        else:
            self._waiting.setdefault(peer, deque()).append(turn)
        return turn

    def drop(self, turn: "asyncio.Future[None]") -> None:
        """Ask no longer; give back the place if it is the caller's already."""
        if turn.done() and not turn.cancelled():
            self.give()
        turn.cancel()

    def give(self) -> None:
        """Give a place back: to the next peer's first turn that is still asked for."""
        while self._waiting:
            peer, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[peer] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class FairPool:
    """Runs functions in `threads` threads. Peers take turns, however many calls each has waiting.

    `run` is for the event loop; all of its state belongs to that thread.
    """

    def __init__(
        self, threads: int, name: str, *, most_waiting: int = 1024, cost: CallCost | None = None
    ) -> None:
        """Start the threads. cost: measures what they do."""
        self._pool, self._cost = ThreadPoolExecutor(threads, name), cost
        self._turns = FairTurns(threads)
        self._most_waiting = most_waiting

    async def run(self, peer: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread.

        Raises Refusal if this peer has too many calls waiting.
        """
        if self._turns.waiting(peer) >= self._most_waiting:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most_waiting} calls of this peer wait already"
            )
        turn = self._turns.ask(peer)
        try:
            await turn
            job = work if self._cost is None else partial(self._cost.work, work)
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._turns.drop(turn)

    def shutdown(self) -> None:
        """End the threads when they have finished what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ReadPermit:
    """One upload's permit."""

    def __init__(self, peer: Hashable, end: Callable[[], object], since_s: float) -> None:
        self.peer, self.end, self.since_s = peer, end, since_s
        self.has_sent = False
        """Its first message has arrived: it is not ended for silence."""


class ReadPermits:
    """At most `most` uploads are read at a time that have not said yet what they are; the others wait.

    Peers take turns. While others wait, the oldest one of the peer with most of those that have sent nothing
    is ended, once it has had `hold_s`. Used by the event loop only. Without it, a thousand first chunks would
    be in memory before one is refused.
    """

    def __init__(self, most: int, hold_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._hold_s, self._clock = hold_s, clock
        self._turns = FairTurns(most)
        self._held: list[ReadPermit] = []

    async def enter(self, peer: Hashable, end: Callable[[], object]) -> ReadPermit:
        """Wait for a permit and return it; `end` ends the upload. `leave` gives it back."""
        turn = self._turns.ask(peer)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=self._hold_s)
                if not turn.done():
                    self.end_oldest()
        except asyncio.CancelledError:
            self._turns.drop(turn)
            raise
        permit = ReadPermit(peer, end, self._clock())
        self._held.append(permit)
        return permit

    def leave(self, permit: ReadPermit) -> None:
        """Give the permit back. Does nothing if that was done before."""
        if permit in self._held:
            self._held.remove(permit)
            self._turns.give()

    def end_oldest(self) -> None:
        """End one upload that has sent nothing within its time limit, if there is one."""
        silent = [permit for permit in self._held if not permit.has_sent]
        crowds = Counter(permit.peer for permit in silent)
        late = [permit for permit in silent if self._clock() - permit.since_s >= self._hold_s]
        if late:
            oldest = max(late, key=lambda permit: (crowds[permit.peer], -permit.since_s))
            oldest.end()
            self.leave(oldest)


class WaitingCalls:
    """Calls that wait for their peers: to send a first message, or to read. Used by the event loop only.

    Above `most`, the oldest one of the peer that has the most is ended to make room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_peer: dict[Hashable, OrderedDict[object, Callable[[], object]]] = {}

    def enter(self, peer: Hashable, call: object, end: Callable[[], object]) -> None:
        """Add a call; `end` ends it."""
        self._by_peer.setdefault(peer, OrderedDict())[call] = end
        self._count += 1
        if self._count > self._most:
            crowd = max(self._by_peer, key=lambda peer: len(self._by_peer[peer]))
            oldest, end_oldest = next(iter(self._by_peer[crowd].items()))
            self.leave(crowd, oldest)
            end_oldest()

    def leave(self, peer: Hashable, call: object) -> None:
        """Remove a call that waits no longer, or is over. Does nothing if it is not there."""
        calls = self._by_peer.get(peer)
        if calls and calls.pop(call, None) is not None:
            self._count -= 1
            if not calls:
                del self._by_peer[peer]


class Stream:
    """One transfer under way. Its thread calls `moved`."""

    def __init__(self, cancel: Callable[[], object], stall_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self.started_s = self.last_s = clock()
        self.num_bytes = 0
        self.cancel = cancel
        self.stalled = False
        """It was ended for standing still."""

    def moved(self, num_bytes: int) -> None:
        """Note that so many more bytes have passed."""
        self.num_bytes += num_bytes
        self.last_s = self._clock()

    def due_s(self, bytes_per_s: float) -> float:
        """Return when it is to be ended, if nothing more passes."""
        paid_s = self.num_bytes / bytes_per_s
        return min(self.last_s, self.started_s + paid_s) + self._stall_s


class StallWatch:
    """Cancels a stream in which nothing has passed for `stall_s`, or less than `bytes_per_s` on average.

    A thread looks whenever a stream may be due, and ends if there is none left. It need not be woken for a
    new stream, which is due later than those that are there. `clock` is for tests.
    """

    def __init__(
        self, stall_s: float, bytes_per_s: float = 1024.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stall_s = stall_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._runs = False

    @contextmanager
    def over(self, cancel: Callable[[], object]) -> Iterator[Stream]:
        """Watch the stream that `cancel` ends for as long as the context lasts."""
        stream = Stream(cancel, self._stall_s, self._clock)
        with self._lock:
            self._streams.add(stream)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="watch", daemon=True).start()
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def end_stalled(self) -> float:
        """Cancel what is due; return the seconds until the next one may be."""
        now_s = self._clock()
        with self._lock:
            due = {stream: stream.due_s(self._bytes_per_s) for stream in self._streams}
            late = [stream for stream, due_s in due.items() if due_s <= now_s]
            self._streams.difference_update(late)
        for stream in late:
            stream.stalled = True
            stream.cancel()
        return min((due_s - now_s for due_s in due.values() if due_s > now_s), default=self._stall_s)

    def _run(self) -> None:
        while True:
            wait_s = self.end_stalled()
            with self._lock:
                if not self._streams:
                    self._runs = False
                    return
            time.sleep(wait_s)
