"""Background work of a hub: time, merges, snapshots and the end of the run."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from zlib_ng.zlib_ng import crc32

from aedit import traces
from aedit.async_sgd.hub import parent_hub
from aedit.async_sgd.journal import JournalBroken, Ledger, NoSpace, Position
from aedit.async_sgd.rules import Merged, Vector

log = logging.getLogger(__name__)

TICK_S = 0.05
"""Interval of decisions while pushes wait for their merge."""
_FULL_PAUSE_S = 1.0
"""Before what found no room on the disk is decided anew."""
_FULL_GAP_S = 10.0
"""Nodes send a push that found no room again within this time."""
_ENDED_S = 3.0
"""A finished run without members has ended after this time without a returning member."""

Event = Callable[..., None]


class HubWorker:
    """Threads that drive a ledger, from `start` to `stop`.

    After `over` is set, `failure` says why; empty if the run has ended well.
    """

    def __init__(
        self,
        ledger: Ledger,
        event: Event,
        *,
        snapshot_bytes: int,
        mergers: int = 1,
        ends_with_run: bool = True,
        call_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create the threads.

        Args:
            ledger: State and journal.
            event: Receives what happens.
            snapshot_bytes: Bytes of the journal after which a snapshot is written.
            mergers: Units that are merged at a time.
            ends_with_run: Set `over` once the run is over and no members are left.
            call_s: Returns the CPU time of a heartbeat, as the server measures it.
        """
        self._call_s = call_s
        self._ends_with_run = ends_with_run
        self.ledger, self.event, self._snapshot_bytes = ledger, event, snapshot_bytes
        self.over = threading.Event()
        self.failure = ""
        self.merge_s = 0.0
        """Time spent on merges, all threads together."""
        self.merges = 0
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._merging: set[int] = set()
        self._pool = ThreadPoolExecutor(mergers, "merge")
        self._ticker = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._snapshots: threading.Thread | None = None
        self._full_until_s = 0.0
        self._full: tuple[float, float, int] | None = None
        """When the disk was first and last found full, and the pushes that were written down before."""
        self._end: Position | None = None
        """End of the journal when the run was first seen to have ended."""
        self._empty_since_s: float | None = None

    def start(self) -> None:
        """Start the threads."""
        self._ticker.start()

    def wake(self) -> None:
        """Look now whether something is due."""
        self._wake.set()

    def stop(self) -> None:
        """Decide nothing more and discard what is being computed."""
        self._stopping.set()
        self._wake.set()
        if self._ticker.is_alive():
            self._ticker.join(timeout=10)
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._snapshots is not None:
            self._snapshots.join(timeout=60)

    def fail(self, error: BaseException) -> None:
        """Stop the hub: its answers could be untrue."""
        if not isinstance(error, JournalBroken):  # that one says all in a line
            log.error("the hub gives up", exc_info=error)
        self.failure = self.failure or f"{type(error).__name__}: {error}"
        self.over.set()

    def is_full(self, error: NoSpace) -> None:
        """Log once that the disk has no room, and pause heavy work."""
        now = self.ledger.clock()
        if not self._full_until_s:
            log.error("%s: pushes are refused until there is room", error)
            self.event("journal_full", reason=str(error))
        self._full_until_s = now + _FULL_PAUSE_S
        since_s = now if self._full is None or self.full_s is None else self._full[0]
        self._full = since_s, now, self.ledger.num_pushes

    @property
    def full_s(self) -> float | None:
        """Return for how long no push has found room on the disk; None if none was refused of late.

        Small records may find room meanwhile.
        """
        if self._full is None:
            return None
        since_s, last_s, num_pushes = self._full
        now = self.ledger.clock()
        is_over = self.ledger.num_pushes > num_pushes or now - last_s >= _FULL_GAP_S
        return None if is_over else now - since_s

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self.over.is_set():
                self.turn()
                self._wake.wait(self._pause_s())
                self._wake.clear()
        except BaseException as error:
            self.fail(error)

    def _pause_s(self) -> float:
        """Return the time until the next turn; `wake` ends it sooner."""
        with self.ledger.lock:
            return max(TICK_S, self.ledger.hub.quiet_s(self.ledger.clock()))

    def turn(self) -> None:
        """Decide what is due now, and let it be done."""
        ledger = self.ledger
        now = ledger.clock()
        if now >= self._full_until_s:
            try:
                self._tick(now)
            except NoSpace as error:
                self.is_full(error)
        is_saving = self._snapshots is not None and self._snapshots.is_alive()
        if ledger.snapshot_is_due(self._snapshot_bytes) and not is_saving:
            self._snapshots = threading.Thread(target=self._snapshot, name="snapshot", daemon=True)
            self._snapshots.start()
        self._look_for_the_end(now)

    def _tick(self, now: float) -> None:
        ledger = self.ledger
        with ledger.lock:
            ledger.hub.clocks.call_s = self._call_s()
            decided = ledger.hub.tick(now, self._merging | ledger.held)
            ledger.commit([record for record in decided if not isinstance(record, Merged)])
            due = [r for r in decided if isinstance(r, Merged) and ledger.may_advance(r.unit)]
            self._merging.update(record.unit for record in due)
        if self._full_until_s and decided:
            self._full_until_s = 0.0
            self.event("journal_has_room")
        for record in due:
            self._pool.submit(self._merge, record)

    def mix(self, unit: int, anchor: Vector, share: float | None) -> bool:
        """Mix in the parent hub's anchor at once and return True; False if the unit must not advance now.

        Everything happens under the lock, as a new segment of the journal must not begin in between; it is
        rare and short.
        """
        ledger = self.ledger
        data = anchor.data.cast("B")
        with ledger.lock:
            if unit in self._merging or self._stopping.is_set() or not ledger.may_advance(unit):
                return False
            payload = ledger.store_payload("fp32", len(anchor), crc32(data), data)
            record = parent_hub.mix(ledger.hub, unit, payload, share)
            ledger.commit([record], ledger.hub.compute(record))
        self.wake()
        return True

    def _merge(self, record: Merged) -> None:
        ledger, spans = self.ledger, list[traces.TraceSpan]()
        try:
            if not ledger.may_advance(record.unit):
                return  # it is decided anew
            spans = [
                traces.opened("hub: merge", push, unit=record.unit, version=record.version)
                for push in ledger.traced_pushes(record)
            ]
            began = ledger.clock()
            computed = ledger.hub.compute(record)
            spent_s = ledger.clock() - began
            if self._stopping.is_set():
                return
            with ledger.lock:
                ledger.commit([record], computed)
                self.merge_s += spent_s
                self.merges += 1
                for span in spans:  # before a node can learn of the version
                    span.end()
        except NoSpace as error:
            self.is_full(error)
        except BaseException as error:
            self.event("merge_failed", unit=record.unit, version=record.version, reason=str(error))
            self.fail(error)
        finally:
            with ledger.lock:
                self._merging.discard(record.unit)
            self.wake()

    def _snapshot(self) -> None:
        try:
            self.event("snapshot", bytes=self.ledger.snapshot(self.wake))
        except (NoSpace, OSError) as error:
            log.error("no snapshot: %s", error)
            self.event("snapshot_failed", reason=str(error))
        except JournalBroken as error:
            self.fail(error)

    def _look_for_the_end(self, now: float) -> None:
        with self.ledger.lock:
            hub = self.ledger.hub
            ended = bool(hub.state.members) and not hub.state.live and hub.progress(now) >= 1.0
            position = self.ledger.journal.position
        if not (ended and self._ends_with_run):
            self._end = self._empty_since_s = None
        elif self._empty_since_s is None:
            # A hub that acknowledges nothing has not replied: nodes may be waiting to come back. Later
            # records only say how old the run is: a standby is always a little behind those.
            self._end = self._end or position
            if self.ledger.is_confirmed(self._end):
                self._empty_since_s = now
        elif now - self._empty_since_s >= _ENDED_S:
            self.over.set()
