"""The journal: a hub writes down what it decides before it happens.

Segments `journal-N` follow one another; a snapshot `snapshot-N` holds everything decided before segment N.
One thread at a time appends small records; payloads are written next to each other. `sync` flushes the writes
of several threads at once.
"""

import errno
import hmac
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.journal.frames import (
    FILE_BYTES,
    FRAME_BYTES,
    PAYLOAD,
    RECORDS,
    SEED_BYTES,
    Chain,
    File,
    Head,
    Stretch,
    chain_of,
    epoch_of,
    frame_header,
    new_head,
    read_head,
)
from aedit.system import sync_directory, write_atomically

Position = tuple[int, int]
"""Segment and byte. What was written before it comes before it."""

NOTE = "journal.json"
"""File beside the journal: its epoch, and the number of its newest segment, once that has a head on disk."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpace(Exception):
    """The disk has no room. Nothing of what was to be written counts."""


class JournalBroken(Exception):
    """The disk failed after it had reported success, or somebody has removed or replaced the journal's file.

    Nothing may be acknowledged any more.
    """


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a batch of records, and the chain up to there."""

    position: Position
    chain: bytes


@dataclass(slots=True)
class _Ends:
    """Progress of the journal, in bytes of the newest segment."""

    written: int
    recorded: int
    """End of the last batch of records."""
    synced: int = 0


class Journal:
    """The newest segment of a folder, open for writing. Any thread may call."""

    def __init__(self, directory: Path, number: int, *, fsync: bool, after: Head | None = None) -> None:
        """Continue at the end of segment `number`, which must be whole; create it if there is none.

        after: the head with which to create it, apart from the mark. By default a new journal begins.
        """
        self.directory, self.number, self._fsync = directory, number, fsync
        self._lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._filling: set[int] = set()
        self._broken = ""
        self._synced: Mark
        path = segment_path(directory, number)
        if path.exists():
            self.file = File(path)
            head = read_head(self.file)
            self._mark, self._seed, self._chain = head.mark, head.seed, chain_of(self.file)
            size = self.file.num_bytes
            self._ends = _Ends(size, size)
            self._marked()
            self._note()
        elif after is not None:
            self._begin(new_head(after.seed, after.before_bytes, after.chain))
        else:
            self._begin(new_head(os.urandom(SEED_BYTES)))

    def append(self, body: bytes) -> Position:
        """Append a batch of records and return the position after it. Raises NoSpace or JournalBroken."""
        with self._lock:
            self._check()
            start = self._ends.written
            header = self._header(RECORDS, len(body), crc32(body))
            frame = header + body
            try:
                self.file.write(start, frame)
            except OSError as error:
                raise self._not_written(start, error) from error
            self._ends.written = self._ends.recorded = start + len(frame)
            self._chain.add(frame)
            return self.number, self._ends.written

    def store(self, data: memoryview) -> Stretch:
        """Write a payload and return its place; it counts once a record refers to it.

        Raises NoSpace or JournalBroken.
        """
        with self._lock:
            self._check()
            start, file = self._ends.written, self.file
            stretch = Stretch(file, start + FRAME_BYTES, data.nbytes)
            try:
                file.write(start, self._header(PAYLOAD, data.nbytes, 0))
                os.ftruncate(file.fd, start + FRAME_BYTES + data.nbytes)
            except OSError as error:
                raise self._not_written(start, error) from error
            self._ends.written = start + FRAME_BYTES + data.nbytes
            self._filling.add(start)
        try:
            file.write(stretch.offset, data)
        except OSError as error:
            raise self._given_up(stretch, error) from error
        finally:
            with self._lock:
                self._filling.discard(start)
        return stretch

    def sync(self, position: Position) -> Mark:
        """Return when all records before `position` are on disk: up to where they are, at least.

        Raises JournalBroken if the disk fails, or the file has been removed, replaced or cut off.
        """
        with self._sync_lock:
            with self._lock:
                self._check()
                number, ends, file = self.number, self._ends, self.file
                # Not beyond: a payload that is being written may be taken back, and its place used again.
                safe = max(ends.recorded, min(self._filling, default=ends.written))
                mark = Mark((number, ends.recorded), self._chain.value)
            if position <= (number, ends.synced) or position[0] < number:
                return self._synced
            if self._fsync:
                self._flush(file)
            self._check_place(file, position[1])
            ends.synced = max(ends.synced, safe)
            self._synced = mark
            return mark

    def check_place(self) -> None:
        """Raise JournalBroken if the file has been removed, replaced or cut off, or the disk has failed."""
        with self._sync_lock:
            with self._lock:
                self._check()
                file, written = self.file, self._ends.recorded
            self._check_place(file, written)

    def rotate(self, *, new_epoch: bool = False) -> int:
        """Begin the next segment and return its number. Nobody may append meanwhile (`store` may).

        new_epoch: it begins another journal, for whose nodes the receipts of this one do not count.
        """
        with self._sync_lock, self._lock:
            self._check()
            if self._fsync:
                self._flush(self.file)
            self._check_place(self.file, 0)
            before = self.file, self.number, self._mark, self._ends, self._chain, self._seed
            try:
                self.number += 1
                seed = os.urandom(SEED_BYTES) if new_epoch else self._seed
                self._begin(new_head(seed, self._ends.written, self._chain.value))
            except OSError as error:
                segment_path(self.directory, self.number).unlink(missing_ok=True)
                self.file, self.number, self._mark, self._ends, self._chain, self._seed = before
                raise self._judged(error) from error
            return self.number

    @property
    def epoch(self) -> str:
        """Return the public name of the journal, drawn when it was begun."""
        return epoch_of(self._seed)

    def mac(self, data: bytes) -> bytes:
        """Return a code over `data` that only who has read the journal can compute."""
        return hmac.digest(self._seed, data, "sha256")[:16]

    @property
    def position(self) -> Position:
        """Return the segment number and the bytes written to it."""
        with self._lock:
            return self.number, self._ends.written

    @property
    def complete(self) -> Position:
        """Return the position before which nothing is still being written."""
        with self._lock:
            return self.number, min(self._filling, default=self._ends.written)

    @property
    def segment_bytes(self) -> int:
        """Return the bytes written to the newest segment."""
        return self._ends.written

    @property
    def broken(self) -> str:
        """Return why nothing can be written any more; empty if it can."""
        return self._broken

    def _begin(self, head: Head) -> None:
        self.file = File(segment_path(self.directory, self.number), create=True)
        self._mark, self._seed, self._chain = head.mark, head.seed, Chain(head)
        self._filling.clear()
        self.file.write(0, head.pack())
        self._ends = _Ends(FILE_BYTES, FILE_BYTES)
        if self._fsync:
            self._flush(self.file)
        sync_directory(self.directory)
        self._note()
        self._marked()

    def _marked(self) -> None:
        self._synced = Mark((self.number, self._ends.recorded), self._chain.value)

    def _note(self) -> None:
        """Write beside the journal which one it is, so that the loss of segments is noticed."""
        write_atomically(
            self.directory / NOTE, json.dumps({"epoch": self.epoch, "segment": self.number}) + "\n"
        )

    def _check_place(self, file: File, num_bytes: int) -> None:
        if lost := file.lost(num_bytes):
            self._broken = (
                f"{file.path} {lost} while the hub was running; nothing is acknowledged any more. Restore the"
                " folder from a copy, or let a standby lead"
            )
            raise JournalBroken(self._broken)

    def _header(self, kind: int, length: int, crc: int) -> bytes:
        ends = self._ends
        return frame_header(self._mark, kind, length, crc, ends.synced if self._fsync else ends.written)

    def _not_written(self, start: int, error: OSError) -> Exception:
        """Take back a partial write and return the error to raise."""
        try:
            os.ftruncate(self.file.fd, start)
        except OSError as worse:
            return self._judged(worse)
        return self._judged(error)

    def _given_up(self, stretch: Stretch, error: OSError) -> Exception:
        """Return the error to raise for a payload that could not be written.

        Others may have been written behind it: then it stays as a hole that nothing refers to.
        """
        with self._lock:
            start, end = stretch.offset - FRAME_BYTES, stretch.offset + stretch.length
            if stretch.file is not self.file or self._ends.written != end:
                return self._judged(error)
            self._ends.written = start
            return self._not_written(start, error)

    def _judged(self, error: OSError) -> Exception:
        if error.errno in _FULL:
            return NoSpace(f"journal: no space ({error.strerror})")
        self._broken = f"{self.file.path}: {error.strerror}"
        return JournalBroken(self._broken)

    def _flush(self, file: File) -> None:
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            # A second try would succeed without having written what the kernel has dropped.
            self._broken = f"{file.path}: {error.strerror}"
            raise JournalBroken(self._broken) from error

    def _check(self) -> None:
        if self._broken:
            raise JournalBroken(self._broken)


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of segment `number`."""
    return directory / f"journal-{number:08d}"
