"""Stream the growing journal of a leading hub to standbys."""

import hashlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from aedit import traces
from aedit.async_sgd.journal import (
    File,
    Ledger,
    Position,
    begin_after,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.proto.rpc import NoNews
from aedit.proto.rpc import hub_pb2 as pb

_CHUNK_BYTES = 2**16
"""Small, so that on a slow line a follower receives something from its leader within its timeout."""
_QUIET_S = 0.5
"""Interval at which an empty chunk is sent while there is nothing new."""


def stream_journal(
    ledger: Ledger, request: pb.TailRequest, check_leads: Callable[[], None]
) -> Iterator[pb.TailChunk | NoNews]:
    """Stream from the given byte on if that segment is still there, else a snapshot first.

    Of a snapshot of which the standby has the first bytes, only the rest is sent. A standby that has other
    records before that byte gets a chunk with `differs`. `NoNews`: there is nothing new now.

    Args:
        ledger: Of the leading hub. The stream ends when its term does.
        request: What the standby has.
        check_leads: Raises Refusal once the hub leads no longer.
    """
    directory = ledger.store.directory
    segment, offset = request.segment, request.offset
    if request.chain and not ledger.receipts.has((segment, offset), request.chain):
        other, lacks = begin_after(directory, request.last_term)
        yield pb.TailChunk(differs=True, segment=other[0], offset=other[1], lacks_term=lacks)
        return
    path = segment_path(directory, segment)
    if not path.exists() or path.stat().st_size < offset:
        segment, offset = (yield from _snapshot(directory, request)), 0
    file = File(segment_path(directory, segment))
    sent_s, term, grown = float("-inf"), ledger.hub.state.term, ledger.grown
    while ledger.hub.state.term == term:  # else it must be confirmed under a higher one
        seen = grown.count  # first: what happens from here on is not missed
        check_leads()
        complete = ledger.journal.complete
        ledger.journal.sync(complete)  # a standby must not have what its primary can lose
        end = complete[1] if complete[0] == segment else file.num_bytes
        if offset < end:
            data = file.read(offset, min(_CHUNK_BYTES, end - offset))
            spans = ledger.traced_in((segment, offset), offset + len(data))
            chunk = _chunk((segment, offset), data)
            chunk.traces.extend(map(str, spans[-traces.MOST_CONTEXTS :]))
            yield chunk
            offset += len(data)
            sent_s = ledger.clock()
        elif ledger.journal.complete[0] > segment:
            segment, offset = segment + 1, 0
            file = File(segment_path(directory, segment))
        elif (left_s := sent_s + _QUIET_S - ledger.clock()) > 0:
            yield NoNews(grown, seen, left_s)
        else:
            yield _chunk((segment, offset), b"")
            sent_s = ledger.clock()


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
    for piece in file.pieces(request.snapshot_bytes):
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
