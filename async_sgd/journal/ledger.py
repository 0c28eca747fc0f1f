"""A hub's state and its journal, kept together: what is decided is written down, then it happens."""

import threading
import time
from collections.abc import Callable, Sequence

from aedit.async_sgd.hub.advance import Computed
from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.hub.saved import save
from aedit.async_sgd.journal.encoding import encode
from aedit.async_sgd.journal.journal import Journal, Position
from aedit.async_sgd.journal.payload import Payload
from aedit.async_sgd.journal.store import Store
from aedit.async_sgd.rules.records import Merged, Mixed, Record

STANDBY_SILENT_S = 2.0
"""After so long without a word a standby is waited for no longer."""
STANDBY_NEAR_BYTES = 8 * 2**20
"""A standby that lags no further than this is waited for."""
_WAIT_LIMIT_S = 30.0


class Ledger:
    """Deciding and `commit` happen under `lock`, one at a time; waiting for the disk does not.

    Whoever tells the outside about something waits for `durable` first: so what anybody knows of the hub is
    what a hub knows that comes back after a crash.
    """

    def __init__(
        self,
        hub: Hub,
        journal: Journal,
        store: Store,
        told: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """told: of every record, once it has happened. Called under the lock."""
        self.hub, self.journal, self.store, self._told, self.clock = hub, journal, store, told, clock
        self.lock = threading.RLock()
        self.standby = StandbyTracker(clock)
        self._saving = threading.Lock()
        # The whole segment counts: a hub that is killed again and again must come to a snapshot, too.
        self._snapshot_at: Position = (journal.position[0], 0)
        self._saved_bytes = store.saved_bytes()
        self.past_bytes = 0
        """Of the segments before the newest one, since this process began."""

    def commit(self, records: Sequence[Record], computed: Computed | None = None) -> Position:
        """Write down and apply; the lock is held. `computed`: of the one heavy record. Raises NoSpace or
        Broken, and nothing has happened."""
        if not records:
            return self.journal.position
        position = self.journal.append(encode(records))
        for record in records:
            self.hub.apply(record, computed if isinstance(record, Merged | Mixed) else None)
            self._told(record)
        return position

    def store_payload(self, codec: str, numel: int, crc: int, data: memoryview) -> Payload:
        """Put an encoded array into the journal's file; it counts once a record refers to it."""
        return Payload(codec, numel, crc, self.journal.store(data))

    def is_current(self, payload: Payload) -> bool:
        """Whether a record that is committed now may refer to it; the lock is held. False: store it again."""
        return payload.stretch.file is self.journal.file

    def durable(self, position: Position) -> None:
        """Returns when `position` is on the disk here, and on a standby if there is one. Raises Broken."""
        self.journal.sync(position)
        self.standby.wait(position)

    def snapshot_is_due(self, num_bytes: int) -> bool:
        """Whether the journal has grown by so much since the last snapshot, and by enough to be worth one."""
        number, offset = self.journal.position
        began, before = self._snapshot_at
        return number != began or offset - before >= max(num_bytes, 2 * self._saved_bytes)

    def snapshot(self) -> int:
        """Write all down in one file, so that the journal before it may go; its bytes. The hub goes on
        meanwhile. Raises NoSpace, Broken or OSError, and the journal stays."""
        with self._saving:
            with self.lock:
                self.past_bytes += self.journal.segment_bytes
                number = self.journal.rotate()
                saved = save(self.hub.state)
            # Also if this fails: it is tried again after as many bytes.
            self._snapshot_at = self.journal.position
            self._saved_bytes = self.store.save(saved, number)
            return self._saved_bytes


class StandbyTracker:
    """The standby, as its primary sees it: there, near, and waited for, or not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._change = threading.Condition()
        self._heard_s = 0.0
        self.confirmed: Position = (0, 0)
        self.attached = False
        self.changed: Callable[[bool], None] = lambda attached: None
        """Called when it is waited for from now on, or no longer."""

    def heard(self, confirmed: Position, newest: Position) -> None:
        """It has everything before `confirmed` on its disk; here is more, up to `newest`."""
        with self._change:
            self._heard_s, self.confirmed = self._clock(), confirmed
            near = confirmed[0] == newest[0] and newest[1] - confirmed[1] <= STANDBY_NEAR_BYTES
            attaches = near and not self.attached
            self.attached = self.attached or near
            self._change.notify_all()
        if attaches:
            self.changed(True)

    def wait(self, position: Position) -> None:
        """Until it has everything before `position`, unless it is not there or falls silent."""
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
        """Find out that it has fallen silent, though nobody waits for it."""
        with self._change:
            lost = self.attached and self._clock() - self._heard_s > STANDBY_SILENT_S
            if lost:
                self.attached = False
        if lost:
            self.changed(False)
