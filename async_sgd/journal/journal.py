"""The journal: a hub writes down what it decides before it happens.

Segments `journal-N` follow one another; a snapshot `snapshot-N` holds everything decided before segment N.
One thread at a time appends small records; payloads are written next to each other. `sync` flushes the writes
of several threads at once.
"""

import hmac
import json
import os
import threading
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
    FileHead,
    chain_of,
    epoch_of,
    frame_header,
    new_head,
    read_head,
)
from aedit.system import is_full, sync_directory, write_if_changed

Position = tuple[int, int]
"""Segment and byte. What was written before it comes before it."""

NOTE = "journal.json"
"""File beside the journal: its epoch, and the number of its newest segment, once that has a head on disk."""


class NoSpace(Exception):
    """The disk has no room. Nothing of what was to be written counts."""


class JournalBroken(Exception):
    """The disk failed after it had reported success, or the journal's file was removed or replaced.

    Nothing may be acknowledged any more.
    """


DurableEnd = tuple[Position, bytes]
"""End of a batch of records that is on disk, and the chain up to there."""


class Journal:
    """The newest segment of a folder, open for writing. Any thread may call."""

    def __init__(
        self,
        directory: Path,
        number: int,
        *,
        fsync: bool,
        after: FileHead | None = None,
        chain: Chain | None = None,
    ) -> None:
        """Continue at the end of segment `number`, which must be whole; create it if there is none.

        Args:
            directory: Of the hub.
            number: Of the segment.
            fsync: Flush what is to be durable.
            after: The head with which to create it, apart from the mark. By default a new journal begins.
            chain: Of the segment, if it is known; else it is read.
        """
        self.directory, self.number, self._fsync = directory, number, fsync
        self._lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._filling: set[int] = set()
        """Where payloads are being written."""
        self._written = self._recorded = self._synced = 0
        """Bytes of the newest segment: all, up to the last batch of records, and those on disk."""
        self._broken = ""
        self.is_closed = False
        """True if nothing may be written, as its hub leads without a vote, on a full disk."""
        path = segment_path(directory, number)
        if path.exists():
            self.file = File(path)
            head = read_head(self.file)
            self._mark, self._seed, self._chain = head.mark, head.seed, chain or chain_of(self.file)
            self._written = self._recorded = self.file.num_bytes
            self._durable: DurableEnd = (number, self._recorded), self._chain.digest
            try:
                self._note(number, head.epoch)
            except OSError as error:
                if not is_full(error):  # a hub starts on a full disk, too: its next segment is noted
                    raise
        elif after is not None:
            self._begin(number, new_head(after.seed, after.before_bytes, after.chain))
        else:
            self._begin(number, new_head(os.urandom(SEED_BYTES)))

    def append(self, body: bytes) -> Position:
        """Append a batch of records and return the position after it. Raises NoSpace or JournalBroken."""
        with self._lock:
            self._check(writes=True)
            start = self._written
            frame = self._header(RECORDS, len(body), crc32(body)) + body
            try:
                self.file.write(start, frame)
            except OSError as error:
                raise self._not_written(start, error) from error
            self._written = self._recorded = start + len(frame)
            self._chain.add(frame, self._written)
            return self.number, self._written

    def store(self, data: memoryview) -> tuple[File, int]:
        """Write a payload and return its file and offset; it counts once a record refers to it.

        Raises NoSpace or JournalBroken.
        """
        with self._lock:
            self._check(writes=True)
            start, file = self._written, self.file
            offset, end = start + FRAME_BYTES, start + FRAME_BYTES + data.nbytes
            try:
                file.write(start, self._header(PAYLOAD, data.nbytes, 0))
                os.ftruncate(file.fd, end)
            except OSError as error:
                raise self._not_written(start, error) from error
            self._written = end
            self._filling.add(start)
        try:
            file.write(offset, data)
        except OSError as error:
            with self._lock:
                if file is not self.file or self._written != end:
                    # Others were written behind it: it stays as a hole that no record refers to.
                    raise self._judged(error) from error
                self._written = start
                raise self._not_written(start, error) from error
        finally:
            with self._lock:
                self._filling.discard(start)
        return file, offset

    def sync(self, position: Position) -> DurableEnd:
        """Return when all records before `position` are on disk: up to where they are, at least.

        Raises JournalBroken if the disk fails, or the file has been removed, replaced or cut off.
        """
        with self._sync_lock:
            with self._lock:
                self._check()
                number, file = self.number, self.file
                # Not beyond: a payload that is being written may be taken back, and its place used again.
                safe = max(self._recorded, min(self._filling, default=self._written))
                end = (number, self._recorded), self._chain.digest
            if position <= (number, self._synced) or position[0] < number:
                return self._durable
            if self._fsync:
                self._flush(file)
            self._check_place(file, position[1])
            self._synced = max(self._synced, safe)
            self._durable = end
            return end

    def check_place(self) -> None:
        """Raise JournalBroken if the file has been removed, replaced or cut off, or the disk has failed."""
        with self._sync_lock:
            with self._lock:
                self._check()
                file, written = self.file, self._recorded
            self._check_place(file, written)

    def rotate(self, *, new_epoch: bool = False) -> int:
        """Begin the next segment and return its number. No thread may append meanwhile (`store` may).

        new_epoch: it begins another journal, for whose nodes the receipts of this one do not count.
        """
        with self._sync_lock, self._lock:
            self._check(writes=True)
            if self._fsync:
                self._flush(self.file)
            self._check_place(self.file, 0)
            try:
                seed = os.urandom(SEED_BYTES) if new_epoch else self._seed
                self._begin(self.number + 1, new_head(seed, self._written, self._chain.digest))
            except OSError as error:
                segment_path(self.directory, self.number + 1).unlink(missing_ok=True)
                raise self._judged(error) from error
            return self.number

    @property
    def chain(self) -> Chain:
        """Return the chain of the newest segment."""
        return self._chain

    def chain_at(self, position: Position) -> bytes | None:
        """Return the chain up to a position; None if it is not known any more, or no batch ends there."""
        with self._lock:
            return self._chain.at(position[1]) if position[0] == self.number else None

    @property
    def epoch(self) -> str:
        """Return the public name of the journal, drawn when it was begun."""
        return epoch_of(self._seed)

    def mac(self, data: bytes) -> bytes:
        """Return a code over `data`, with a key that only readers of the journal have."""
        return hmac.digest(self._seed, data, "sha256")[:16]

    @property
    def position(self) -> Position:
        """Return the segment number and the bytes written to it."""
        with self._lock:
            return self.number, self._written

    @property
    def complete(self) -> Position:
        """Return the position before which nothing is still being written."""
        with self._lock:
            return self.number, min(self._filling, default=self._written)

    @property
    def segment_bytes(self) -> int:
        """Return the bytes written to the newest segment."""
        return self._written

    @property
    def broken(self) -> str:
        """Return why nothing can be written any more; empty if it can."""
        return self._broken

    def _begin(self, number: int, head: FileHead) -> None:
        """Create segment `number`, and continue in it once it is on disk."""
        file = File(segment_path(self.directory, number), create=True)
        file.write(0, head.pack())
        if self._fsync:
            self._flush(file)
        sync_directory(self.directory)
        self._note(number, head.epoch)
        self.file, self.number, self._mark, self._seed = file, number, head.mark, head.seed
        self._chain = Chain(head)
        self._filling.clear()
        self._written = self._recorded = FILE_BYTES
        self._synced, self._durable = 0, ((number, FILE_BYTES), self._chain.digest)

    def _note(self, number: int, epoch: str) -> None:
        """Write beside the journal which one it is, so that the loss of segments is noticed."""
        write_if_changed(self.directory / NOTE, json.dumps({"epoch": epoch, "segment": number}) + "\n")

    def _check_place(self, file: File, num_bytes: int) -> None:
        if fault := file.fault(num_bytes):
            self._broken = (
                f"{file.path} {fault} while the hub was running; nothing is acknowledged any more. Restore"
                " the folder from a copy, or let a standby lead"
            )
            raise JournalBroken(self._broken)

    def _header(self, kind: int, length: int, crc: int) -> bytes:
        return frame_header(self._mark, kind, length, crc, self._synced if self._fsync else self._written)

    def _not_written(self, start: int, error: OSError) -> Exception:
        """Take back a partial write and return the error to raise."""
        try:
            os.ftruncate(self.file.fd, start)
        except OSError as worse:
            return self._judged(worse)
        return self._judged(error)

    def _judged(self, error: OSError) -> Exception:
        if is_full(error):
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

    def _check(self, *, writes: bool = False) -> None:
        if self._broken:
            raise JournalBroken(self._broken)
        if writes and self.is_closed:
            raise NoSpace("journal: there was no space when this hub started: it must be elected first")


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of segment `number`."""
    return directory / f"journal-{number:08d}"
