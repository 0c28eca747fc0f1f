"""The journal: a hub writes down what it decides before it happens.

Segments `journal-N` follow one another; a snapshot `snapshot-N` holds everything decided before segment N.
One thread at a time appends small records; payloads are written next to each other. `sync` flushes the writes
of several threads at once.
"""

import errno
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

from aedit.async_sgd.journal.frames import (
    FILE_BYTES,
    FRAME_BYTES,
    PAYLOAD,
    RECORDS,
    File,
    Stretch,
    file_head,
    frame_header,
    read_head,
)
from aedit.system import sync_directory

Position = tuple[int, int]
"""Segment and byte. What was written before it comes before it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpace(Exception):
    """The disk has no room. Nothing of what was to be written counts."""


class JournalBroken(Exception):
    """The disk failed after it had reported success. Nothing may be acknowledged any more."""


@dataclass(slots=True)
class _Ends:
    """Progress of the journal, in bytes of the newest segment."""

    written: int
    synced: int = 0


class Journal:
    """The newest segment of a folder, open for writing. Any thread may call."""

    def __init__(self, directory: Path, number: int, *, fsync: bool) -> None:
        """Continue at the end of segment `number`, which must be whole; create it if there is none."""
        self.directory, self.number, self._fsync = directory, number, fsync
        self._lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._filling: set[int] = set()
        self._broken = ""
        path = segment_path(directory, number)
        if path.exists():
            self.file = File(path)
            self._mark, _ = read_head(self.file)
            self._ends = _Ends(self.file.num_bytes)
        else:
            self._begin(0)

    def append(self, body: bytes) -> Position:
        """Append a batch of records and return the position after it. Raises NoSpace or JournalBroken."""
        with self._lock:
            self._check()
            start = self._ends.written
            header = self._header(RECORDS, len(body), zlib.crc32(body))
            try:
                self.file.write(start, header + body)
            except OSError as error:
                raise self._not_written(start, error) from error
            self._ends.written = start + len(header) + len(body)
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

    def sync(self, position: Position) -> None:
        """Return when everything before `position` is on disk. Raises JournalBroken."""
        with self._sync_lock:
            with self._lock:
                self._check()
                number, ends, file = self.number, self._ends, self.file
                written = ends.written
            if position <= (number, ends.synced) or position[0] < number:
                return
            if self._fsync:
                self._flush(file)
            ends.synced = max(ends.synced, written)

    def rotate(self) -> int:
        """Begin the next segment and return its number. Nobody may append meanwhile (`store` may)."""
        with self._sync_lock, self._lock:
            self._check()
            if self._fsync:
                self._flush(self.file)
            before = self.file, self.number, self._mark, self._ends
            try:
                self.number += 1
                self._begin(before[3].written)
            except OSError as error:
                segment_path(self.directory, self.number).unlink(missing_ok=True)
                self.file, self.number, self._mark, self._ends = before
                raise self._judged(error) from error
            return self.number

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

    def _begin(self, before_bytes: int) -> None:
        self.file = File(segment_path(self.directory, self.number), create=True)
        self._mark = os.urandom(4)
        self._filling.clear()
        self.file.write(0, file_head(before_bytes, self._mark))
        self._ends = _Ends(FILE_BYTES)
        if self._fsync:
            self._flush(self.file)
        sync_directory(self.directory)

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
