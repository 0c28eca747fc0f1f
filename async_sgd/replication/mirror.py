"""A copy of a primary's journal, byte for byte, and the state that follows from it."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.hub import Clocks, Hub, HubState, load_state, save_state
from aedit.async_sgd.journal import (
    FILE_BYTES,
    RECORDS,
    Chain,
    Damaged,
    File,
    Frame,
    Journal,
    JournalBroken,
    NoSpace,
    Position,
    Store,
    chain_of,
    check_payloads,
    decode_records,
    delete_after,
    frame_at,
    move_aside,
    read_head,
    read_snapshot,
    segment_path,
    snapshot_path,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.system import is_full, sync_directory
from aedit.types import UserError

log = logging.getLogger(__name__)


class Mirror:
    """The journal and state of a standby.

    One thread calls `trim`, `cut` and `take`, one `sync`, one `apply`. Any may read `position` and `hub`, the
    hub under `lock`.
    """

    def __init__(
        self, store: Store, make: Callable[[], Hub], recovered: tuple[Hub, Journal] | None = None
    ) -> None:
        """Continue with what the folder has.

        Args:
            store: Of the folder.
            make: Returns a hub without a state.
            recovered: Hub and journal, if the folder has just been recovered; a long journal takes a while.
        """
        self._store, self._make, self._directory = store, make, store.directory
        self.lock = threading.RLock()
        """Held while records are applied."""
        self.partial = PartialSnapshot(self._directory)
        self._is_arriving = False
        """A chunk of a snapshot has come since the last `trim`, and its segment has not begun."""
        self._marked: tuple[File, bytes] | None = None
        """The segment whose mark was read last, and the mark."""
        self._load(*(recovered or self._recover()))
        if self.position == (1, FILE_BYTES):  # the first segment, which was begun here and not there
            self.clear(keep=False)

    @property
    def epoch(self) -> str:
        """Return the epoch of the journal as far as it is applied; "" before its first segment."""
        with self.lock:
            return read_head(self._reading).epoch if self._applied[1] else ""

    def _recover(self) -> tuple[Hub, Journal]:
        hub = self._make()
        return hub, self._store.recover(hub)

    def _load(self, hub: Hub, journal: Journal) -> None:
        """Take over what the folder has."""
        self.hub = hub
        self._file: File = journal.file
        self._reading: File = journal.file
        self.position: Position = journal.position
        """Everything before it is written, here."""
        self._found: Position = journal.position
        """Everything before it was in the folder already. A machine without power may have lost a part of a
        payload that no record refers to yet."""
        self._applied: Position = journal.position
        self._chain: Chain | None = journal.chain
        """Of the segment that is being applied, up to there; None: it is to be read."""

    def forget(self) -> None:
        """Set aside what the folder has, and begin anew, without the part of a snapshot that has arrived."""
        with self.lock:
            self.partial.drop()
            self.clear(keep=True)

    def clear(self, *, keep: bool) -> None:
        """Begin anew, and keep the part of a snapshot that has arrived: its leader compares its hash.

        keep: set aside what the folder has; else delete it, as the leader has it too.
        """
        with self.lock:
            self._remove(keep=keep)
            self.hub, self.position, self._applied, self._found = self._make(), (1, 0), (1, 0), (1, 0)

    def trim(self) -> tuple[Position, bytes]:
        """Cut off an incomplete end, and return the end of the rest and the chain up to there.

        The chain is empty if no segment has begun: after a snapshot, or in an empty folder.
        """
        with self.lock:
            self._is_arriving = False  # until the leader goes on with a snapshot
            segment, offset = self.position = self._end()
            if offset:
                self._file = self._reading
            return (segment, offset), self._known_chain().digest if offset else b""

    def cut(self, end: Position) -> bool:
        """Set aside all records from `end` on, and return True; or False if that is not possible here.

        Then `forget` is what is left: there is nothing behind `end`, or the folder does not go back so far.
        """
        segment, offset = end
        with self.lock:
            path = segment_path(self._directory, segment)
            if end >= self._applied or offset < FILE_BYTES or not path.exists():
                return False
            self._remove(segment, offset, keep=True)
            os.truncate(path, offset)
            try:
                self._load(*self._recover())
            except UserError as error:
                log.warning("going back to %s: %s", end, error)
                return False
            return self.position == end

    def take(self, chunk: pb.TailChunk) -> None:
        """Write a received chunk.

        Raises Damaged if it does not continue the last one, OSError if the disk is full.
        """
        if crc32(chunk.data) != chunk.crc:
            raise Damaged("the journal was damaged on its way")
        at = chunk.segment, chunk.offset
        if chunk.snapshot:
            with self.lock:
                self.partial.take(chunk.segment, chunk.offset, chunk.data)
                self._is_arriving = True
        elif not chunk.data:
            return
        else:
            if not self._is_arriving:
                with self.lock:
                    self.partial.drop()  # the journal goes on without it
            if chunk.offset == 0:
                self._begin(chunk.segment)
            if at != self.position:
                raise Damaged(f"the journal goes on at {at}, not at {self.position}")
            self._file.write(chunk.offset, chunk.data)
            self.position = chunk.segment, chunk.offset + len(chunk.data)

    def sync(self) -> Position:
        """Flush to disk and return the position before which everything is there.

        Raises JournalBroken if the file has been removed, replaced or cut off.
        """
        with self.lock:
            position, file = self.position, self._file
            fault = file.fault(position[1]) if position[1] else ""
        if fault:
            raise JournalBroken(f"{file.path} {fault} while the standby was running")
        os.fdatasync(file.fd)
        return position

    @property
    def is_applied(self) -> bool:
        """Return whether the state is that of all whole batches that have come."""
        with self.lock:
            segment, offset = self._applied
            if self.position <= self._applied or self.position == (segment, 0):
                return True
            return offset > 0 and self.position[0] == segment and self._frame(segment, offset) is None

    def apply(self) -> bool:
        """Apply one batch of records and return True, or return False if there is none. Raises Damaged."""
        with self.lock:
            segment, offset = self._applied
            if self.position <= self._applied or self.position == (segment, 0):
                return False
            if offset == 0:
                if self.position < (segment, FILE_BYTES):
                    return False
                self._reading = File(segment_path(self._directory, segment))
                offset = FILE_BYTES  # the head is confirmed as records are: it is not given up without need
                self._applied, self._chain = (segment, offset), None
            frame = self._frame(segment, offset)
            if frame is None:
                if self.position[0] == segment:
                    return False
                if offset < self._reading.num_bytes:
                    raise Damaged(f"{self._reading.path}: ends within the frame at byte {offset}")
                return self._turn_over(segment + 1)
            if frame.kind == RECORDS:
                body = frame.read()
                batch = decode_records(body, frame.file)
                if segment == self._found[0]:
                    check_payloads(batch, self._found[1])
                for record in batch:
                    self.hub.apply(record)
                self._known_chain().add(frame.header + body, frame.end)
            self._applied = segment, frame.end
            return True

    def journal(self) -> Journal:
        """Apply everything, cut off an incomplete end, and return the journal for writing.

        Ends the mirroring, until the next `trim`. Raises NoSpace.
        """
        with self.lock:
            self.partial.drop()
            segment, offset = self._end()
            chain, self._chain = self._known_chain() if offset else None, None
            self.hub.clocks = Clocks()  # the time while it followed is not the run's
            try:
                return self._store.open(segment, chain)
            except OSError as error:
                if not is_full(error):
                    raise
                raise NoSpace(f"{self._directory}: no space ({error.strerror})") from error

    def _end(self) -> Position:
        """Apply everything, cut off an incomplete end, and return where the rest ends."""
        while self.apply():
            pass
        segment, offset = self._applied
        if self.position[0] > segment or offset == 0:  # a segment without a head
            segment_path(self._directory, self.position[0]).unlink(missing_ok=True)
        if offset:
            os.ftruncate(self._reading.fd, offset)
            os.fsync(self._reading.fd)
        return segment, offset

    def _remove(self, segment: int = 0, offset: int = 0, *, keep: bool) -> None:
        """Remove the snapshots and segments behind a position."""
        if not keep:
            delete_after(self._directory, segment)
        elif (place := move_aside(self._directory, segment, offset)) is not None:
            log.error(
                "%s: records that the leader does not have are set aside here, and not used any more; delete"
                " them if they are not missed",
                place,
            )

    def _frame(self, segment: int, offset: int) -> Frame | None:
        """Return the next frame of the segment that is being applied; None if not all of it has arrived."""
        if self.position < (segment, FILE_BYTES):
            return None
        return frame_at(self._reading, self._mark_of(self._reading), offset)

    def _known_chain(self) -> Chain:
        """Return the chain of the segment that is being applied, up to there. Raises Damaged."""
        if self._chain is None:
            self._chain = chain_of(self._reading, self._applied[1])
        return self._chain

    def _mark_of(self, file: File) -> bytes:
        """Return the mark of a segment that has its head; it is read once. Raises Damaged."""
        if self._marked is None or self._marked[0] is not file:
            self._marked = file, read_head(file).mark
        return self._marked[1]

    def _begin(self, segment: int) -> None:
        """Begin the next segment, or the first one after a snapshot or of a journal."""
        with self.lock:
            if self._is_arriving:
                self._adopt(segment)
            elif segment != self.position[0] + 1 and self.position[1] > 0:
                raise Damaged(f"segment {segment} comes after segment {self.position[0]}")
            os.fdatasync(self._file.fd)
            self._file = File(segment_path(self._directory, segment), create=True)
            sync_directory(self._directory)
            self.position = segment, 0

    def _adopt(self, segment: int) -> None:
        """Replace everything by a snapshot that has arrived whole.

        The leader has deleted the segments that it would have compared with those here. So these are deleted
        only if the snapshot has all their pushes; else they are set aside.
        """
        self._is_arriving = False
        self.partial.sync(segment)
        self.clear(keep=_lacks(self.partial.numbers(), self.hub.state))
        path = snapshot_path(self._directory, segment)
        self.partial.finish(path)
        load_state(read_snapshot(path), self.hub.state)
        self._applied = segment, 0

    def _turn_over(self, segment: int) -> bool:
        """Finish a segment that is applied to its end: the state is that of the primary's snapshot.

        Returns False as long as the head of the next one has not arrived. Raises Damaged if that was not
        written after this one.
        """
        if self.position < (segment, FILE_BYTES):
            return False
        head = read_head(File(segment_path(self._directory, segment)))
        if (self._reading.num_bytes, self._known_chain().digest) != (head.before_bytes, head.chain):
            raise Damaged(f"segment {segment} was not written after {self._reading.path}")
        self._applied = segment, 0
        try:
            self._store.save(save_state(self.hub.state), segment)
        except OSError as error:
            log.error("no snapshot: %s", error)
        return True


def _lacks(numbers: Mapping[str, Any], state: HubState) -> bool:
    """Return whether a snapshot with these numbers lacks a term or a push that `state` has."""
    known = {member["name"]: dict(member["received"]) for member in numbers["members"]}
    return numbers["term"] < state.term or any(
        seq > known.get(member.name, {}).get(unit, 0)
        for member in state.members
        for unit, seq in member.received.items()
    )


_NAME = "incoming_"
"""The file is not named like a snapshot: nothing reads it as one before it is whole."""


class PartialSnapshot:
    """The snapshot that a follower is fetching, in a file of its folder; there is one at most."""

    def __init__(self, directory: Path) -> None:
        """Continue with the part that the folder has."""
        self._directory, self._segment = directory, 0
        self._file: File | None = None
        found = (path.name.removeprefix(_NAME) for path in directory.glob(f"{_NAME}*"))
        for number in sorted(int(number) for number in found if number.isdecimal()):
            self.drop()  # that of a lower number, whose deletion was not on disk when the machine failed
            self._segment, self._file = number, File(self._path(number))

    def received(self) -> tuple[int, int, bytes] | None:
        """Return the segment after the snapshot, the bytes on disk and their SHA-256; None without a file."""
        if self._file is None:
            return None
        num_bytes, digest = self._file.num_bytes, hashlib.sha256()
        for piece in self._file.pieces(num_bytes):
            digest.update(piece)
        return self._segment, num_bytes, digest.digest()

    def take(self, segment: int, offset: int, data: bytes) -> None:
        """Write a chunk. The first byte of a snapshot, and another snapshot, begin a new file.

        Raises Damaged if the chunk does not begin at the end of the file, OSError if the disk is full.
        """
        if self._file is None or offset == 0 or segment != self._segment:
            self.drop()
            self._segment, self._file = segment, File(self._path(segment), create=True)
        if offset != self._file.num_bytes:
            raise Damaged(f"snapshot {segment} goes on at byte {offset}, not at {self._file.num_bytes}")
        self._file.write(offset, data)

    def sync(self, segment: int) -> None:
        """Flush the file to disk. Raises Damaged if it is not the snapshot before `segment`."""
        if self._file is None or segment != self._segment:
            raise Damaged(f"segment {segment} comes after snapshot {self._segment}")
        os.fsync(self._file.fd)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the snapshot, which is whole. Raises Damaged."""
        assert self._file is not None
        return read_snapshot(self._file.path)[0]

    def finish(self, path: Path) -> None:
        """Move the file, which is whole and flushed, to its place as a snapshot."""
        assert self._file is not None
        os.replace(self._file.path, path)
        sync_directory(self._directory)
        self._segment, self._file = 0, None

    def drop(self) -> None:
        """Delete the file, if there is one."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
            self._segment, self._file = 0, None

    def _path(self, segment: int) -> Path:
        return self._directory / f"{_NAME}{segment}"
