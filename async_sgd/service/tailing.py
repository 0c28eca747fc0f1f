"""Stream the growing journal to standbys."""

import hashlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import grpc
from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.journal import (
    File,
    Position,
    begin_after,
    pieces,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.async_sgd.service.request_guard import RequestGuard
from aedit.proto.rpc import Quiet, Refusal
from aedit.proto.rpc import hub_pb2 as pb

_CHUNK_BYTES = 2**16
"""Small, so that on a slow line a follower hears something of its leader within its limit of silence."""
_QUIET_S = 0.5
"""Without anything new, an empty chunk is sent so often."""


class Tailing:
    """The leader's side of its standbys."""

    def __init__(self, guard: RequestGuard) -> None:
        self._guard, self._ledger = guard, guard.ledger

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk | Quiet]:
        """Stream from the given byte on if that segment is still there, else a snapshot first.

        Of a snapshot of which the standby has the first bytes, only the rest is sent. A standby that has
        other records before that byte is told so. `Quiet`: there is nothing new now.
        """
        self._guard.check_term(request.term, from_hub=True)
        directory = self._ledger.store.directory
        segment, offset = request.segment, request.offset
        if request.chain and not self._ledger.receipts.has((segment, offset), request.chain):
            other, lacks = begin_after(directory, request.last_term)
            yield pb.TailChunk(differs=True, segment=other[0], offset=other[1], lacks_term=lacks)
            return
        path = segment_path(directory, segment)
        if not path.exists() or path.stat().st_size < offset:
            segment, offset = (yield from _snapshot(directory, request)), 0
        yield from self._segments(segment, offset)

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        """Note that the standby's disk has everything before this."""
        self._guard.check_follower()
        self._guard.check_term(request.term, from_hub=True)
        newest = self._ledger.journal.complete
        if (request.segment, request.offset) > newest:
            text = (
                f"byte {request.offset} of segment {request.segment} is confirmed, and {newest} is the newest"
            )
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
        if request.term != self._ledger.hub.state.term or self._guard.is_shut_out(request.address):
            return pb.ConfirmReply()
        position = request.segment, request.offset
        return pb.ConfirmReply(
            stand=self._guard.leadership.confirm(request.replica, position, request.address)
        )

    def _segments(self, segment: int, offset: int) -> Iterator[pb.TailChunk | Quiet]:
        directory = self._ledger.store.directory
        file = File(segment_path(directory, segment))
        told_s, term, grown = 0.0, self._ledger.hub.state.term, self._ledger.grown
        while self._ledger.hub.state.term == term:  # else it must be confirmed under a higher one
            seen = grown.count  # first: what happens from here on is not missed
            self._guard.check_leads()
            end = self._end(file, segment)
            if offset < end:
                data = file.read(offset, min(_CHUNK_BYTES, end - offset))
                yield _chunk((segment, offset), data)
                offset += len(data)
                told_s = time.monotonic()
            elif self._ledger.journal.complete[0] > segment:
                segment, offset = segment + 1, 0
                file = File(segment_path(directory, segment))
            elif (left_s := told_s + _QUIET_S - time.monotonic()) > 0:
                yield Quiet(grown, seen, left_s)
            else:
                yield _chunk((segment, offset), b"")
                told_s = time.monotonic()

    def _end(self, file: File, segment: int) -> int:
        """Return how much of a segment is complete and on disk.

        A standby must not have what its primary can lose.
        """
        complete = self._ledger.journal.complete
        self._ledger.journal.sync(complete)
        return complete[1] if complete[0] == segment else file.num_bytes


def _snapshot(directory: Path, request: pb.TailRequest) -> Generator[pb.TailChunk, None, int]:
    """Yield the chunks of a snapshot, and return the number of the segment after it; 1 without one."""
    named = request.snapshot_segment
    if segment_path(directory, named).exists():
        try:
            file = File(snapshot_path(directory, named))
        except FileNotFoundError:
            pass
        else:
            if (yield from _has_first_bytes(file, request)):
                yield from _file(file, named, request.snapshot_bytes)
                return named
    numbers = segment_numbers(directory, "snapshot")
    if not numbers:
        return 1
    yield from _file(File(snapshot_path(directory, numbers[-1])), numbers[-1], 0)
    return numbers[-1]


def _has_first_bytes(file: File, request: pb.TailRequest) -> Generator[pb.TailChunk, None, bool]:
    """Return whether a standby has the first bytes of this file.

    Yields empty chunks meanwhile, so that the call does not end for silence.
    """
    if not 0 < request.snapshot_bytes <= file.num_bytes:
        return False
    digest = hashlib.sha256()
    for piece in pieces(file, request.snapshot_bytes):
        digest.update(piece)
        yield pb.TailChunk()
    return digest.digest() == request.snapshot_sha256


def _file(file: File, segment: int, offset: int) -> Iterator[pb.TailChunk]:
    """Yield a snapshot from a byte on: one chunk without data if that is its end."""
    end = file.num_bytes
    if offset == end:
        yield _chunk((segment, offset), b"", snapshot=True)
    while offset < end:
        data = file.read(offset, _CHUNK_BYTES)
        yield _chunk((segment, offset), data, snapshot=True)
        offset += len(data)


def _chunk(at: Position, data: bytes, *, snapshot: bool = False) -> pb.TailChunk:
    return pb.TailChunk(segment=at[0], offset=at[1], data=data, snapshot=snapshot, crc=crc32(data))
