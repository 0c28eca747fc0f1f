"""From the engine's thread to the event loop: what has become of the samples of a request.

A feed keeps the newest state of each sample and no queue: however slowly a client reads, nothing grows but
the samples themselves. All feeds that have news wake the loop with one call.
"""

import asyncio
import threading
from collections.abc import Sequence

from aedit.spec_rollout.sampling import Rollout


class Bridge:
    """Wakes feeds of one event loop from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._woken: set[Feed] = set()

    def wake(self, feed: "Feed") -> None:
        """Wake a feed soon. May be called from any thread."""
        with self._lock:
            is_first = not self._woken
            self._woken.add(feed)
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._wake_all)
            except RuntimeError:  # the loop is closed: nobody waits
                self._woken.clear()

    def _wake_all(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, set()
        for feed in woken:
            feed.news.set()


class SampleFeed:
    """Newest state of one sample: `SampleReceiver` in the engine's thread, read in the event loop."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self.state: tuple[Rollout | None, int] = (None, 0)
        """The rollout, and how many of its tokens may be read."""
        self.is_over = False
        self.error: Exception | None = None

    def tokens(self, rollout: Rollout, start: int) -> None:
        """See `SampleReceiver`."""
        self.state = rollout, len(rollout.tokens)
        if self._feed.is_stream:
            self._feed.wake()

    def ended(self, rollout: Rollout) -> None:
        """See `SampleReceiver`."""
        self.state, self.is_over = (rollout, len(rollout.tokens)), True
        self._feed.wake()

    def failed(self, error: Exception) -> None:
        """See `SampleReceiver`."""
        self.error, self.is_over = error, True
        self._feed.wake()


class Feed:
    """The samples of one request."""

    def __init__(self, bridge: Bridge, num_samples: int, *, is_stream: bool) -> None:
        """Make a feed; a stream is woken by tokens, others by the ends of samples only."""
        self._bridge, self.is_stream = bridge, is_stream
        self.news = asyncio.Event()
        self.samples: Sequence[SampleFeed] = [SampleFeed(self) for _ in range(num_samples)]

    def wake(self) -> None:
        """Wake the reader of this feed. May be called from any thread."""
        self._bridge.wake(self)

    @property
    def is_over(self) -> bool:
        """Return true if all samples are over."""
        return all(sample.is_over for sample in self.samples)

    def check(self) -> None:
        """Raise the error of the first sample that has failed."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error
