"""A snapshot of which a part has arrived: a file that survives a lost connection and a restart."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aedit.async_sgd.journal.frames import Damaged, File
from aedit.system import sync_directory

_NAME = "incoming_"
"""The file is not named like a snapshot: nothing reads it as one before it is whole."""
_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Received:
    """The first bytes of the snapshot before segment `segment`."""

    segment: int
    num_bytes: int
    sha256: bytes


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

    def received(self) -> Received | None:
        """Return what is on disk, with the hash of the bytes of the file; None without a file."""
        if self._file is None:
            return None
        num_bytes, digest = self._file.num_bytes, hashlib.sha256()
        for piece in pieces(self._file, num_bytes):
            digest.update(piece)
        return Received(self._segment, num_bytes, digest.digest())

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


def pieces(file: File, num_bytes: int) -> Iterator[bytes]:
    """Yield the first `num_bytes` bytes of a file piece by piece; fewer if it is shorter."""
    for offset in range(0, num_bytes, _PIECE_BYTES):
        yield file.read(offset, min(_PIECE_BYTES, num_bytes - offset))
