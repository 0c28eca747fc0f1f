"""Limits per peer of a server: calls per second, and bytes under way."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic

from aedit.proto.rpc.frames import CHUNK_BYTES

_LEAST_WINDOW = 2**16 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server. The defaults are those of `HubConfig.limits`."""

    nodes: int = 256
    """Members at a time, which is also how many kinds of callers are told apart per host."""
    calls_per_s: float = 200.0
    """Calls of one node, with bursts of as many."""
    in_flight_bytes: int = 2**30
    """Bytes of all pushes being received at a time."""
    connections: int = 1024
    """Connections of one host."""
    stall_s: float = 30.0
    """Without a byte for so long, a stream is ended."""
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


class Rates:
    """A token bucket per key: `per_s` a second, bursts of as many. Remembers the `keys` latest."""

    def __init__(self, per_s: float, *, keys: int = 4096, clock: Callable[[], float] = monotonic) -> None:
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
