"""Files of framed records: the format of a hub's journal segments and snapshots.

A file begins with a head: format, four random bytes (the mark), the length of the segment before it, the seed
of the journal, and the chain of the segment before it. Then come frames: a header with its own CRC, and a
body. The mark begins every header, so that the sender of a payload cannot put something into it that looks
like a frame.

The seed is drawn when the journal is begun; its hash is the epoch, which is public. The chain is the
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
from contextlib import suppress
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
PIECE_BYTES = 2**22
_KNOWN_ENDS = 2**14
"""Ends of batches of the newest segment at which its chain is kept: nodes and followers show recent ones."""


class Damaged(Exception):
    """The content of a file is not what was written."""


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

    def fault(self, num_bytes: int) -> str:
        """Return what another process did to the file; "" if it is in place with at least `num_bytes`."""
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
            count = os.preadv(self.fd, [view[:PIECE_BYTES]], offset)
            if not count:
                raise Damaged(f"{self.path} ends early")
            view, offset = view[count:], offset + count

    def pieces(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the first `num_bytes` bytes piece by piece; fewer if the file is shorter."""
        for offset in range(0, num_bytes, PIECE_BYTES):
            yield self.read(offset, min(PIECE_BYTES, num_bytes - offset))

    def view(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes without a copy in memory; valid as long as it is held."""
        if not length:
            return memoryview(b"")
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self.fd, before + length, access=mmap.ACCESS_READ, offset=offset - before)
        return memoryview(mapped)[before:]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self.fd, view[:PIECE_BYTES], offset)
            view, offset = view[count:], offset + count


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a file. offset and length are those of its body."""

    file: File
    kind: int
    crc: int
    offset: int
    length: int
    synced: int
    header: bytes
    """As it is in the file."""

    @property
    def end(self) -> int:
        """Return the offset after the frame."""
        return self.offset + self.length

    def read(self) -> bytes:
        """Return the body. Raises Damaged if it is not what was written."""
        data = self.file.read(self.offset, self.length)
        if len(data) != self.length or crc32(data) != self.crc:
            raise Damaged(f"{self.file.path}: damaged at byte {self.offset}")
        return data


@dataclass(frozen=True, slots=True)
class FileHead:
    """The head of a file."""

    mark: bytes
    """Random bytes that begin every frame of the file."""
    before_bytes: int
    """Length of the segment before it; 0 if there is none."""
    seed: bytes
    """Random bytes of the journal, secret to peers that cannot read it."""
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


def new_head(seed: bytes, before_bytes: int = 0, chain: bytes = bytes(CHAIN_BYTES)) -> FileHead:
    """Return the head of a new file. chain: of the segment before, which has `before_bytes`."""
    return FileHead(os.urandom(4), before_bytes, seed, chain)


def read_head(file: File) -> FileHead:
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
    return FileHead(mark, before_bytes, seed, chain)


class Chain:
    """The chain of a segment, which grows with it, and its values at the ends of the newest batches."""

    def __init__(self, head: FileHead) -> None:
        """Begin behind the head of the segment."""
        self._hash = hashlib.sha256(head.pack())
        self.digest = self._hash.digest()
        """Up to the newest batch."""
        self._ends = {FILE_BYTES: self.digest}

    def add(self, frame: bytes, end: int) -> None:
        """Go on with a RECORDS frame, header and body, which ends at the byte `end`."""
        self._hash.update(frame)
        self.digest = self._ends[end] = self._hash.digest()
        if len(self._ends) > _KNOWN_ENDS:
            del self._ends[next(iter(self._ends))]

    def at(self, end: int) -> bytes | None:
        """Return the chain up to the byte at which a batch ends; None if that is not known any more."""
        return self._ends.get(end)


def chain_of(file: File, end: int | None = None) -> Chain:
    """Return the chain of a segment up to the byte `end`; default: all of it.

    Raises Damaged if a frame before it is not whole.
    """
    chain = Chain(read_head(file))
    for frame, body in frames(file, end=end):
        if frame.kind == RECORDS:
            chain.add(frame.header + body, frame.end)
    return chain


def frame_header(mark: bytes, kind: int, length: int, crc: int, synced: int) -> bytes:
    """Return the header of a body. crc: of the body; 0 for a PAYLOAD."""
    first = _FRAME.pack(mark, kind, crc, length, synced, 0)[:-4]
    return first + struct.pack("<I", crc32(first))


def frame_at(file: File, mark: bytes, offset: int, num_bytes: int | None = None) -> Frame | None:
    """Return the frame that begins at `offset`, without its body; None if the file ends within it.

    Raises Damaged if there is none.

    num_bytes: of the file, if they are known.
    """
    header = file.read(offset, FRAME_BYTES)
    if len(header) < FRAME_BYTES:
        return None
    if crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
        raise Damaged(f"{file.path}: damaged at byte {offset}")
    found, kind, crc, length, synced, _ = _FRAME.unpack(header)
    if found != mark:
        raise Damaged(f"{file.path}: another file's frame at byte {offset}")
    frame = Frame(file, kind, crc, offset + FRAME_BYTES, length, synced, header)
    return frame if frame.end <= (file.num_bytes if num_bytes is None else num_bytes) else None


def frames(file: File, offset: int = FILE_BYTES, end: int | None = None) -> Iterator[tuple[Frame, bytes]]:
    """Yield all frames from `offset` to `end` with their bodies, which are empty for PAYLOAD and ARRAY.

    What is written meanwhile does not count.

    Raises Damaged at the first that is not whole.
    """
    mark, size = read_head(file).mark, file.num_bytes
    while offset < (size if end is None else end):
        frame = frame_at(file, mark, offset, size)
        if frame is None:
            raise Damaged(f"{file.path}: ends within the frame at byte {offset}")
        yield frame, b"" if frame.kind in (PAYLOAD, ARRAY) else frame.read()
        offset = frame.end


def is_vouched_for(file: File, offset: int) -> bool:
    """Return whether a later frame says that the bytes at `offset` were on disk."""
    mark = read_head(file).mark
    at, end = offset + 1, file.num_bytes
    while at < end:
        data = file.read(at, PIECE_BYTES)
        place = -1
        while (place := data.find(mark, place + 1)) >= 0:
            with suppress(Damaged):
                frame = frame_at(file, mark, at + place)
                if frame is not None and frame.synced > offset:
                    return True
        at += max(1, len(data) - len(mark) + 1)
    return False
