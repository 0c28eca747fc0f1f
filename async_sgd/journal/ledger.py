"""The ledger of a hub: its state and its journal together. A decision is written down, then it happens."""

import threading
import time
from collections.abc import Callable, Sequence

from aedit.async_sgd.hub.advance import Computed
from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.hub.saved import save_state
from aedit.async_sgd.journal.encoding import encode_records
from aedit.async_sgd.journal.journal import Journal, Position
from aedit.async_sgd.journal.payload import Payload
from aedit.async_sgd.journal.receipts import Receipts
from aedit.async_sgd.journal.store import Store
from aedit.async_sgd.rules.records import Merged, Mixed, Record
from aedit.proto.wire import hub_pb2 as pb

STANDBY_SILENT_S = 2.0
"""After so long without a word a standby is waited for no longer."""
STANDBY_NEAR_BYTES = 8 * 2**20
"""A standby that lags no further than this is waited for."""
_WAIT_LIMIT_S = 30.0


class Ledger:
    """State machine and journal behind one lock.

    Deciding and `commit` happen under `lock`, one at a time; waiting for the disk does not. Call `durable`
    before anything is told to a peer: then a hub that restarts after a crash knows everything that any peer
    knows of it.
    """

    def __init__(
        self,
        hub: Hub,
        journal: Journal,
        store: Store,
        told: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join a hub and its journal. told.

        Called with every record, once it has happened, under the lock.
        """
        self.hub, self.journal, self.store, self._told, self.clock = hub, journal, store, told, clock
        self.lock = threading.RLock()
        self.receipts = Receipts(journal)
        self.receipt = pb.Receipt()
        """The latest one; empty before anything was acknowledged."""
        self.standby = StandbyTracker(clock)
        self._saving = threading.Lock()
        # The whole segment counts: a hub that is killed again and again must come to a snapshot, too.
        self._snapshot_at: Position = (journal.position[0], 0)
        self._saved_bytes = store.saved_bytes()
        self.past_bytes = 0
        """Of the segments before the newest one, since this process began."""

    def commit(self, records: Sequence[Record], computed: Computed | None = None) -> Position:
        """Write records down and apply them; the lock is held. Returns the journal's position after them.

        computed: the result of the one heavy record. Raises NoSpace or Broken, and nothing has happened.
        """
        if not records:
            return self.journal.position
        position = self.journal.append(encode_records(records))
        for record in records:
            self.hub.apply(record, computed if isinstance(record, Merged | Mixed) else None)
            self._told(record)
        return position

    def store_payload(self, codec: str, numel: int, crc: int, data: memoryview) -> Payload:
        """Write an encoded array to the journal's file; it counts once a record refers to it."""
        return Payload(codec, numel, crc, self.journal.store(data))

    def is_current(self, payload: Payload) -> bool:
        """Return whether a record that is committed now may refer to it; the lock is held.

        If not, store it again.
        """
        return payload.stretch.file is self.journal.file

    def durable(self, position: Position) -> pb.Receipt:
        """Return a receipt when `position` is on disk here, and at the standby if there is one.

        Raises Broken.
        """
        mark = self.journal.sync(position)
        self.standby.wait(max(position, mark.position))
        self.receipt = receipt = self.receipts.give(mark)
        return receipt

    def snapshot_is_due(self, num_bytes: int) -> bool:
        """Return whether the journal has grown by `num_bytes`, and by enough, since the last snapshot."""
        number, offset = self.journal.position
        began, before = self._snapshot_at
        return number != began or offset - before >= max(num_bytes, 2 * self._saved_bytes)

    def snapshot(self) -> int:
        """Write a snapshot, so that the journal before it may be deleted, and return its bytes.

        The hub goes on meanwhile. Raises NoSpace, Broken or OSError, and the journal stays.
        """
        with self._saving:
            with self.lock:
                self.past_bytes += self.journal.segment_bytes
                number = self.journal.rotate()
                saved = save_state(self.hub.state)
            # Also if this fails: it is tried again after as many bytes.
            self._snapshot_at = self.journal.position
            self._saved_bytes = self.store.save(saved, number)
            return self._saved_bytes


class StandbyTracker:
    """The standby as its primary sees it: absent, catching up, or attached and waited for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._change = threading.Condition()
        self._heard_s = 0.0
        self.confirmed: Position = (0, 0)
        self.attached = False
        self.changed: Callable[[bool], None] = lambda attached: None
        """Called when it is waited for from now on, or no longer."""

    def heard(self, confirmed: Position, newest: Position) -> None:
        """Note that the standby has everything before `confirmed` on disk; the journal ends at `newest`."""
        with self._change:
            self._heard_s, self.confirmed = self._clock(), confirmed
            near = confirmed[0] == newest[0] and newest[1] - confirmed[1] <= STANDBY_NEAR_BYTES
            attaches = near and not self.attached
            self.attached = self.attached or near
            self._change.notify_all()
        if attaches:
            self.changed(True)

    def wait(self, position: Position) -> None:
        """Wait until the standby has everything before `position`, unless it is absent or falls silent."""
        limit_s = self._clock() + _WAIT_LIMIT_S
        with self._change:
            while self.attached and self.confirmed < position:
                now_s = self._clock()
                if now_s - self._heard_s > STANDBY_SILENT_S or now_s > limit_s:
                    self.attached = False
                    self._change.notify_all()
                    break
                self._change.wait(0.1)
            else:
                return
        self.changed(False)

    def look(self) -> None:
        """Detach a standby that has fallen silent while nobody waited for it."""
        with self._change:
            lost = self.attached and self._clock() - self._heard_s > STANDBY_SILENT_S
            if lost:
                self.attached = False
        if lost:
            self.changed(False)
