"""Where a hub writes down what it decides, before it happens.

Segments `journal-N` follow one another; a snapshot `snapshot-N` is all that was decided before segment N. One
thread at a time appends small records; payloads are written beside each other. `sync` puts what several
threads have written on the disk at once.
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


class Broken(Exception):
    """The disk does not do what it said. Nothing may be acknowledged any more."""


@dataclass(slots=True)
class _Ends:
    """How far the journal has come, in bytes of the newest segment."""

    written: int
    synced: int = 0


class Journal:
    """The newest segment of a folder, to be written on. Any thread may call."""

    def __init__(self, directory: Path, number: int, *, fsync: bool) -> None:
        """Goes on at the end of segment `number`, which must be whole; makes it if there is none."""
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
        """Add a batch of records; returns the position after it. Raises NoSpace or Broken."""
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
        """Put a payload into the file; it counts once a record refers to it. Raises NoSpace or Broken."""
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
        """Returns when everything before `position` is on the disk. Raises Broken."""
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
        """Begin the next segment, whose number is returned. Nobody may append meanwhile (`store` may)."""
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
        with self._lock:
            return self.number, self._ends.written

    @property
    def complete(self) -> Position:
        """Nothing before it is still being written."""
        with self._lock:
            return self.number, min(self._filling, default=self._ends.written)

    @property
    def segment_bytes(self) -> int:
        return self._ends.written

    @property
    def broken(self) -> str:
        """Why nothing can be written any more; empty: it can."""
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
        """Take back what has half been written."""
        try:
            os.ftruncate(self.file.fd, start)
        except OSError as worse:
            return self._judged(worse)
        return self._judged(error)

    def _given_up(self, stretch: Stretch, error: OSError) -> Exception:
        """A payload could not be written. Behind it others may have: then it stays, as a hole that nothing
        refers to."""
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
        return Broken(self._broken)

    def _flush(self, file: File) -> None:
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            # A second try would succeed without having written what the kernel has dropped.
            self._broken = f"{file.path}: {error.strerror}"
            raise Broken(self._broken) from error

    def _check(self) -> None:
        if self._broken:
            raise Broken(self._broken)


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"journal-{number:08d}"
