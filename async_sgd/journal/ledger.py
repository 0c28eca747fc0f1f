"""The ledger of a hub: its state and its journal together. A decision is written down, then it happens."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aedit import traces
from aedit.async_sgd.hub import Computed, Hub, SavedUnit, Unit, frozen, save_numbers, save_unit
from aedit.async_sgd.journal.encoding import Payload, encode_records
from aedit.async_sgd.journal.journal import Journal, Position
from aedit.async_sgd.journal.receipts import Receipts
from aedit.async_sgd.journal.store import Store
from aedit.async_sgd.rules import Accepted, Merged, Mixed, Record
from aedit.proto.rpc import Notifier
from aedit.proto.rpc import hub_pb2 as pb

_TRACED = 256
"""Newest traced pushes that are kept."""


@dataclass(frozen=True, slots=True)
class TracedPush:
    """An accepted push whose node traces it."""

    key: tuple[int, int, int]
    """Unit, node and number."""
    end: Position
    """Where its record ends in the journal."""
    span: traces.TraceContext
    """Of its arrival at the hub."""


class Unconfirmed(Exception):
    """Another hub that must have what was decided does not have it yet. It may still be confirmed later."""


class Ledger:
    """State machine and journal behind one lock.

    Deciding and `commit` happen under `lock`, one at a time; waiting for the disk does not. Call `durable`
    before any reply to a peer: then a hub that restarts after a crash knows everything that any peer knows of
    it.

    A snapshot is of one moment. A unit that is merged before it is written is in memory twice. So its merge
    begins once it is written, and the units for which merges wait are written first.
    """

    def __init__(
        self,
        hub: Hub,
        journal: Journal,
        store: Store,
        applied: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join a hub and its journal. applied: called with every applied record, under the lock."""
        self.hub, self.journal, self.store, self.clock = hub, journal, store, clock
        self._applied = applied
        self.lock = threading.RLock()
        self.grown = Notifier()
        """Notifies when the journal has grown, or its hub leads no longer."""
        self.receipts = Receipts(journal)
        self.receipt = pb.Receipt()
        """Newest receipt, for the next replies to nodes; empty before anything was acknowledged."""
        self.confirmed: Callable[[Position], None] = lambda position: None
        """Returns when all replicas have everything before the position. Raises Unconfirmed."""
        self.is_confirmed: Callable[[Position], bool] = lambda position: True
        """Returns whether all replicas have everything before the position."""
        self.versions_at: Position = journal.position
        """Before it are the records of all versions."""
        self.num_pushes = 0
        """Accepted pushes that were written down since this process began."""
        self.traced = deque[TracedPush](maxlen=_TRACED)
        self._saving = threading.Lock()
        self._units_lock = threading.Lock()
        self._unwritten: dict[int, Unit] = {}
        """Units of the snapshot that is being written, of a frozen state."""
        self._wanted: dict[int, None] = {}
        """Units for which merges wait."""
        self._writing: int | None = None
        # The whole segment counts: a hub that is killed again and again must come to a snapshot, too.
        self._snapshot_at: Position = (journal.position[0], 0)
        self._saved_bytes = store.saved_bytes()
        self.past_bytes = 0
        """Bytes of the segments before the newest one, since this process began."""

    def commit(self, records: Sequence[Record], computed: Computed | None = None) -> Position:
        """Write records down and apply them; the lock is held. Returns the journal's position after them.

        computed: the result of the one heavy record. After NoSpace or JournalBroken nothing has happened.
        """
        if not records:
            return self.journal.position
        position = self.journal.append(encode_records(records))
        for record in records:
            self.hub.apply(record, computed if isinstance(record, Merged | Mixed) else None)
            self._applied(record)
        self.num_pushes += sum(isinstance(record, Accepted) for record in records)
        if (span := traces.current().context) is not None:
            pushes = [record.push for record in records if isinstance(record, Accepted)]
            self.traced.extend(TracedPush((p.unit, p.node, p.seq), position, span) for p in pushes)
        if any(isinstance(record, Merged | Mixed) for record in records):
            self.versions_at = position
        self.grown.notify()
        return position

    def store_payload(self, codec: str, numel: int, crc: int, data: memoryview) -> Payload:
        """Write an encoded array to the journal's file; it counts once a record refers to it."""
        return Payload(codec, numel, crc, *self.journal.store(data), data.nbytes)

    def is_current(self, payload: Payload) -> bool:
        """Return whether a record that is committed now may refer to it; the lock is held.

        If not, store it again.
        """
        return payload.file is self.journal.file

    def durable(self, position: Position) -> pb.Receipt:
        """Return a receipt when `position` is on disk here and at all replicas.

        Raises JournalBroken or Unconfirmed.
        """
        with traces.spanning("hub: journal sync"):
            end = self.journal.sync(position)
        with traces.spanning("hub: standby confirmation"):
            self.confirmed(max(position, end[0]))
        self.receipt = receipt = self.receipts.give(end)
        return receipt

    def traced_in(self, start: Position, end: int) -> list[traces.TraceContext]:
        """Return the spans of traced pushes whose records end behind `start`, up to byte `end` there."""
        if not traces.is_on():
            return []
        with self.lock:  # a record is in the file before its span is here
            return [each.span for each in self.traced if start < each.end <= (start[0], end)]

    def traced_pushes(self, merged: Merged) -> list[traces.TraceContext]:
        """Return the spans of the traced pushes that a merge takes in."""
        if not traces.is_on():
            return []
        parts = {(merged.unit, part.node, part.seq) for part in merged.parts}
        with self.lock:
            return [each.span for each in self.traced if each.key in parts]

    def snapshot_is_due(self, num_bytes: int) -> bool:
        """Return whether the journal has grown by `num_bytes`, and by enough, since the last snapshot."""
        number, offset = self.journal.position
        began, before = self._snapshot_at
        return number != began or offset - before >= max(num_bytes, 2 * self._saved_bytes)

    def may_advance(self, unit: int) -> bool:
        """Return whether a unit may have a new version now.

        Not if a snapshot has it still to write: it is written soon, and would be in memory twice until then.
        """
        with self._units_lock:
            if unit not in self._unwritten and unit != self._writing:
                return True
            self._wanted.setdefault(unit)
            return False

    @property
    def held(self) -> frozenset[int]:
        """Return the units of which `may_advance` is still not true, among those that it was asked of."""
        with self._units_lock:
            return frozenset(self._wanted)

    def snapshot(self, written: Callable[[], None] = lambda: None) -> int:
        """Write a snapshot, so that the journal before it may be deleted, and return its bytes.

        The hub goes on meanwhile. Raises NoSpace, JournalBroken or OSError, and the journal stays.

        written: called whenever another unit is written, which may then have new versions.
        """
        with self._saving:
            with self.lock:
                self.past_bytes += self.journal.segment_bytes
                number = self.journal.rotate()
                self.grown.notify()
                state = frozen(self.hub.state)
                with self._units_lock:
                    self._unwritten = state.units
            # Also if this fails: it is tried again after as many bytes.
            self._snapshot_at = self.journal.position
            try:
                self._saved_bytes = self.store.save((save_numbers(state), self._units(written)), number)
            finally:  # the units are written, or will not be
                with self._units_lock:
                    self._unwritten.clear()
                    self._wanted.clear()
                    self._writing = None
                written()
            return self._saved_bytes

    def _units(self, written: Callable[[], None]) -> Iterator[SavedUnit]:
        """Yield every unit of the snapshot once; it counts as written when the next one is asked for."""
        while True:
            with self._units_lock:
                wanted = (unit for unit in self._wanted if unit in self._unwritten)
                index = next(wanted, next(iter(self._unwritten), None))
                if index is None:
                    return
                self._writing, unit = index, self._unwritten.pop(index)
            saved = save_unit(index, unit)
            del unit
            yield saved
            del saved  # what has been written need not be kept alive
            with self._units_lock:
                self._wanted.pop(index, None)
                self._writing = None
            written()
