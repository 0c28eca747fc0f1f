"""Arrays in chunks: `Chunk` of hub.proto without the copies that the generated class makes.

The bytes on the wire are those of protobuf, so either end may use the generated class instead. Sending copies
the data once, into the message; a received chunk is a view of the bytes that gRPC has handed over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from zlib_ng.zlib_ng import crc32

CHUNK_BYTES = 2**20
"""Most data in one chunk, either way."""

FIRST_CHUNK_BYTES = 2**14
"""Data in the first chunk that is sent; each further one has twice as much, up to `CHUNK_BYTES`. A transfer
goes on after the last whole chunk, so that one whose link is cut again and again gets ahead each time."""

MESSAGE_BYTES = 2 * CHUNK_BYTES
"""No message of any kind is larger."""

# Tags: field number * 8 + wire type.
_OFFSET, _CRC, _DATA, _HEAD = 0x08, 0x15, 0x1A, 0x22  # each fits into one byte
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MOST_FIELDS = 64
"""A message of 2 MiB could have a million, which take a second to read."""


class ArrayIncomplete(ValueError):
    """The array is incomplete. A cut link looks like a peer that has ended."""


class ChunkDamaged(ValueError):
    """Bits have changed on the way; a repetition may succeed. head: the chunk's head as it arrived."""

    def __init__(self, text: str, head: bytes = b"") -> None:
        super().__init__(text)
        self.head = head


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an array. crc: CRC-32 of data followed by head."""

    offset: int = 0
    crc: int = 0
    data: memoryview | bytes = b""
    head: memoryview | bytes = b""

    def check(self) -> None:
        """Raise ChunkDamaged if the checksum is not that of the content."""
        if crc32(self.head, crc32(self.data)) != self.crc:
            raise ChunkDamaged(f"chunk at byte {self.offset}: the checksum does not match", bytes(self.head))


def chunks(
    head: bytes, data: memoryview, *, offset: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Yield `data` from byte `offset` on in chunks of up to `chunk_bytes`, which are views of it.

    The first one carries `head`, and is sent even if there is no data.
    """
    start, size = offset, min(FIRST_CHUNK_BYTES, chunk_bytes)
    while start < data.nbytes or start == offset:
        piece = data[start : start + size]
        yield Chunk(start, crc32(head, crc32(piece)), piece, head)
        start, size, head = start + size, min(2 * size, chunk_bytes), b""


def pack_chunk(chunk: Chunk) -> bytes:
    """Return `chunk` as a protobuf message, the same bytes that the generated class writes."""
    parts: list[bytes | memoryview] = []
    if chunk.offset:
        parts.append(bytes((_OFFSET,)) + _varint(chunk.offset))
    if chunk.crc:
        parts.append(bytes((_CRC,)) + chunk.crc.to_bytes(4, "little"))
    for tag, value in ((_DATA, chunk.data), (_HEAD, chunk.head)):
        if len(value):
            parts += (bytes((tag,)) + _varint(len(value)), value)
    return b"".join(parts)


def unpack_chunk(message: bytes) -> Chunk:
    """Return the chunk in a protobuf message, as views of it.

    Fields come in any order and the last of each counts; unknown ones are skipped. Raises ValueError if it is
    no message, or has too many fields.
    """
    view = memoryview(message)
    offset, crc = 0, 0
    data, head = view[:0], view[:0]
    at = num_fields = 0
    while at < len(view):
        num_fields += 1
        if num_fields > _MOST_FIELDS:
            raise ValueError(f"a chunk of more than {_MOST_FIELDS} fields")
        tag, at = _read_varint(view, at)
        start, end, value = _field(view, at, tag)
        if tag == _OFFSET:
            offset = value
        elif tag == _CRC:
            crc = value
        elif tag == _DATA:
            data = view[start:end]
        elif tag == _HEAD:
            head = view[start:end]
        at = end
    return Chunk(offset, crc, data, head)


class Assembly:
    """An array that arrives in chunks, in order: nothing is believed before it is checked.

    `num_bytes` is what the sender has declared; raises ValueError if it is above `limit_bytes`, before
    anything is allocated. With `into`, the array is put there, of which the first `offset` bytes are there
    already.
    """

    def __init__(
        self, num_bytes: int, *, limit_bytes: int, into: memoryview | None = None, offset: int = 0
    ) -> None:
        if num_bytes > limit_bytes:
            raise ValueError(f"{num_bytes} bytes declared, at most {limit_bytes} are allowed")
        if not 0 <= offset <= num_bytes:
            raise ValueError(f"starts at byte {offset} of {num_bytes}")
        if into is None:
            # Not zeroed: memory is taken only as data arrives.
            into = np.empty(num_bytes, np.uint8).data
        self._buffer = into.cast("B")[:num_bytes]
        self.num_bytes = num_bytes
        self.received = offset
        """Bytes from the start that are there and checked."""
        self._begun = False

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises ValueError, and keeps nothing of it, if it is not the next one, is damaged, too long or empty.
        """
        size = len(chunk.data)
        if chunk.offset != self.received:
            raise ValueError(f"a chunk at byte {chunk.offset}, where {self.received} is next")
        if size > min(CHUNK_BYTES, self.num_bytes - self.received):
            raise ValueError(f"a chunk of {size} bytes at byte {chunk.offset} of {self.num_bytes}")
        # Nothing may be sent once, where nothing is missing; not for ever.
        if size == 0 and self._begun:
            raise ValueError(f"an empty chunk at byte {chunk.offset}")
        chunk.check()
        self._buffer[self.received : self.received + size] = chunk.data
        self.received += size
        self._begun = True

    @property
    def data(self) -> memoryview:
        """Return the whole array. Raises ValueError as long as something is missing."""
        if self.received < self.num_bytes:
            raise ArrayIncomplete(f"ended after {self.received} of {self.num_bytes} bytes")
        return self._buffer


class Receiver:
    """An array that is assembled from messages; `begin` gets the head and the byte that it starts at."""

    def __init__(self, begin: Callable[[bytes, int], Assembly]) -> None:
        self._begin = begin
        self._assembly: Assembly | None = None

    def add(self, message: bytes) -> None:
        """Take the next message. Raises ValueError for anything that is not as declared."""
        chunk = unpack_chunk(message)
        if self._assembly is None:
            if not chunk.head:
                raise ValueError("the first chunk has no head")
            chunk.check()
            self._assembly = self._begin(bytes(chunk.head), chunk.offset)
        self._assembly.add(chunk)

    @property
    def data(self) -> memoryview:
        """Return the whole array. Raises ValueError as long as something is missing."""
        if self._assembly is None:
            raise ValueError("the first chunk has no head")
        return self._assembly.data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the number that starts at `at`, and where it ends."""
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(view):
            raise ValueError("the message ends within a number")
        byte = view[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 2**64 - 1, at + place + 1
    raise ValueError("a number of more than 64 bits")


def _field(view: memoryview, at: int, tag: int) -> tuple[int, int, int]:
    """Return where the field's bytes start and end, and its value if it is a number."""
    kind = tag & 7
    value = 0
    if not 8 <= tag < 2**32:
        raise ValueError(f"no field has tag {tag}")
    if kind == _VARINT:
        value, end = _read_varint(view, at)
    elif kind == _BYTES:
        length, at = _read_varint(view, at)
        end = at + length
    elif kind in (_FIXED32, _FIXED64):
        end = at + (4 if kind == _FIXED32 else 8)
        value = int.from_bytes(view[at:end], "little")
    else:
        raise ValueError(f"a field of wire type {kind}")
    if end > len(view):
        raise ValueError("the message ends within a field")
    return at, end, value
