"""Files of framed records: the format of a hub's journal segments and snapshots.

A file begins with a head: format, four random bytes (the mark), the length of the segment before it, the seed
of the journal, and the chain of the segment before it. Then come frames: a header with its own CRC, and a
body. The mark begins every header, so that the sender of a payload cannot put something into it that looks
like a frame.

The seed is drawn when the journal is begun; its hash is the epoch, which everybody may know. The chain is the
SHA-256 of a segment's head and of all its RECORDS frames. As the head holds the chain of the segment before,
it covers everything that was decided since the journal began (a payload through its CRC in the record).

A header also says how much of its file was known to be on disk when it was written. Damage beyond that point
was never acknowledged and is cut off; damage before it is refused.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from aedit.types import UserError

RECORDS, PAYLOAD, ARRAY, HEAD, UNIT, END = 1, 2, 3, 4, 5, 6
"""Kinds of frames. The body of a PAYLOAD has its CRC in the record that refers to it: it is written beside
others, without holding them up, and may be a hole if the process died meanwhile."""

_FILE = struct.Struct("<8s4sQ16s32sI")
_FRAME = struct.Struct("<4sB3xIQQI")
_FORMAT = b"aedit-2\n"
_ANY_FORMAT = b"aedit-"
SEED_BYTES, CHAIN_BYTES = 16, 32
FILE_BYTES, FRAME_BYTES = _FILE.size, _FRAME.size
_PIECE = 2**22


class Damaged(Exception):
    """The content of a file is not what was written."""


class Short(Damaged):
    """A file has fewer bytes than were written, or than will have been."""


class File:
    """An open file. It stays readable after its name is gone, until nothing refers to it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open the file for reading and writing. create: anew, so that only its owner can read the seed."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC) * create, 0o600)

    def __del__(self) -> None:
        if fd := getattr(self, "fd", None):
            os.close(fd)

    @property
    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def lost(self, num_bytes: int) -> str:
        """Return what has happened to the file behind this process's back; "" if it is in its place.

        num_bytes: that it must have at least.
        """
        own = os.fstat(self.fd)
        try:
            named = os.stat(self.path)
        except OSError:
            return "was removed, or its folder was"
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            return "was replaced by another file"
        return "was cut off" if own.st_size < num_bytes else ""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer at the end of the file."""
        return os.pread(self.fd, length, offset)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view`. Raises Damaged if the file is too short."""
        while view:
            count = os.preadv(self.fd, [view[:_PIECE]], offset)
            if not count:
                raise Damaged(f"{self.path} ends early")
            view, offset = view[count:], offset + count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self.fd, view[:_PIECE], offset)
            view, offset = view[count:], offset + count


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of bytes in a file."""

    file: File
    offset: int
    length: int

    def view(self) -> memoryview:
        """Return the bytes without a copy in memory; valid as long as it is held."""
        if not self.length:
            return memoryview(b"")
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self.file.fd, before + self.length, access=mmap.ACCESS_READ, offset=self.offset - before
        )
        return memoryview(mapped)[before:]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a file."""

    kind: int
    crc: int
    body: Stretch
    synced: int

    @property
    def end(self) -> int:
        """Return the offset after the frame."""
        return self.body.offset + self.body.length

    def read(self) -> bytes:
        """Return the body. Raises Damaged if it is not what was written."""
        data = self.body.file.read(self.body.offset, self.body.length)
        if len(data) != self.body.length or crc32(data) != self.crc:
            raise Damaged(f"{self.body.file.path}: damaged at byte {self.body.offset}")
        return data


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a file."""

    mark: bytes
    """Random bytes that begin every frame of the file."""
    before_bytes: int
    """Length of the segment before it; 0 if there is none."""
    seed: bytes
    """Random bytes of the journal, which only those know who can read it."""
    chain: bytes
    """Chain of the segment before it; zeros if there is none."""

    @property
    def epoch(self) -> str:
        """Return the public name of the journal."""
        return epoch_of(self.seed)

    def pack(self) -> bytes:
        """Return the head as it is in the file."""
        first = _FILE.pack(_FORMAT, self.mark, self.before_bytes, self.seed, self.chain, 0)[:-4]
        return first + struct.pack("<I", crc32(first))


def epoch_of(seed: bytes) -> str:
    """Return the public name of the journal with this seed."""
    return hashlib.sha256(b"epoch" + seed).hexdigest()[:16]


def new_head(seed: bytes, before_bytes: int = 0, chain: bytes = bytes(CHAIN_BYTES)) -> Head:
    """Return the head of a new file. chain: of the segment before, which has `before_bytes`."""
    return Head(os.urandom(4), before_bytes, seed, chain)


def read_head(file: File) -> Head:
    """Return the head of a file.

    Raises Damaged if it has none, UserError if another version of aedit has written it.
    """
    head = file.read(0, FILE_BYTES)
    form = head[: len(_FORMAT)]
    if len(form) == len(_FORMAT) and form.startswith(_ANY_FORMAT) and form != _FORMAT:
        raise UserError(
            f"{file.path} was written by another version of aedit: finish the run with that version, or start"
            " a new run with another --directory"
        )
    if len(head) < FILE_BYTES or crc32(head[:-4]) != struct.unpack("<I", head[-4:])[0]:
        raise Damaged(f"{file.path} has no head")
    _, mark, before_bytes, seed, chain, _ = _FILE.unpack(head)
    return Head(mark, before_bytes, seed, chain)


class Chain:
    """Running hash of a segment: its head and its RECORDS frames, in order."""

    def __init__(self, head: Head) -> None:
        self._hash = hashlib.sha256(head.pack())

    def add(self, frame: bytes) -> None:
        """Add a RECORDS frame, header and body."""
        self._hash.update(frame)

    @property
    def value(self) -> bytes:
        """Return the hash of everything so far."""
        return self._hash.digest()


def chain_of(file: File, end: int | None = None) -> Chain:
    """Return the chain of a segment up to the byte `end`, of all of it by default.

    Raises Damaged if a frame before it is not whole.
    """
    chain = Chain(read_head(file))
    for frame, body in frames(file, end=end):
        if frame.kind == RECORDS:
            chain.add(file.read(frame.body.offset - FRAME_BYTES, FRAME_BYTES) + body)
    return chain


def frame_header(mark: bytes, kind: int, length: int, crc: int, synced: int) -> bytes:
    """Return the header of a body. crc: of the body; 0 for a PAYLOAD."""
    first = _FRAME.pack(mark, kind, crc, length, synced, 0)[:-4]
    return first + struct.pack("<I", crc32(first))


def frame_at(file: File, mark: bytes, offset: int) -> Frame:
    """Return the frame that begins at `offset`; its body is not read.

    Raises Damaged if there is none, or no end.
    """
    header = file.read(offset, FRAME_BYTES)
    if len(header) < FRAME_BYTES:
        raise Short(f"{file.path}: ends within the frame at byte {offset}")
    if crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
        raise Damaged(f"{file.path}: damaged at byte {offset}")
    found, kind, crc, length, synced, _ = _FRAME.unpack(header)
    if found != mark:
        raise Damaged(f"{file.path}: another file's frame at byte {offset}")
    if offset + FRAME_BYTES + length > file.num_bytes:
        raise Short(f"{file.path}: ends within the frame at byte {offset}")
    return Frame(kind, crc, Stretch(file, offset + FRAME_BYTES, length), synced)


def frames(file: File, offset: int = FILE_BYTES, end: int | None = None) -> Iterator[tuple[Frame, bytes]]:
    """Yield all frames from `offset` to `end` with their bodies, which are empty for PAYLOAD and ARRAY.

    Raises Damaged at the first that is not whole.
    """
    mark = read_head(file).mark
    while offset < (file.num_bytes if end is None else end):
        frame = frame_at(file, mark, offset)
        yield frame, b"" if frame.kind in (PAYLOAD, ARRAY) else frame.read()
        offset = frame.end


def is_vouched_for(file: File, offset: int) -> bool:
    """Return whether something that was written later knew that the bytes at `offset` were on disk."""
    mark = read_head(file).mark
    at, end = offset + 1, file.num_bytes
    while at < end:
        data = file.read(at, _PIECE)
        place = -1
        while (place := data.find(mark, place + 1)) >= 0:
            try:
                if frame_at(file, mark, at + place).synced > offset:
                    return True
            except Damaged:
                continue
        at += max(1, len(data) - len(mark) + 1)
    return False
