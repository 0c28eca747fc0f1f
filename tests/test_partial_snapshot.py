"""Tests that the transfer of a snapshot to a follower goes on where it was cut."""

import re
import zlib
from hashlib import sha256
from itertools import islice, takewhile

import pytest
from kit.leading_hub import leading_hub
from kit.wire import cutting
from test_journal import Book, same
from test_kept_journal import Follower

from aedit.async_sgd.hub import save_state
from aedit.async_sgd.journal import Damaged, frames, segment_numbers, segment_path, snapshot_path
from aedit.async_sgd.replication import journal_stream
from aedit.async_sgd.replication.mirror import PartialSnapshot
from aedit.async_sgd.rules import Led
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.client import HubClient
from aedit.proto.rpc.retry import HubUnreachable
from aedit.proto.rpc.service import NoNews

CHUNK = 5000


class CutFollower(Follower):
    """A follower that counts the bytes of snapshots, and whose next calls end after `limit` chunks."""

    limit = None

    def follow(self, ledger):
        self.snapshot_bytes = 0
        super().follow(ledger)

    def _chunks(self, ledger, request):
        for chunk in islice(super()._chunks(ledger, request), self.limit):
            self.snapshot_bytes += len(chunk.data) * chunk.snapshot
            yield chunk

    def follow_for(self, ledger, num_chunks):
        """Follow until so many chunks have come and the connection is lost."""
        self.limit = num_chunks
        self.follow(ledger)
        self.limit = None


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A leader with the snapshots 3 and 4, each of which is many chunks."""
    monkeypatch.setattr(journal_stream, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(frames, "PIECE_BYTES", 2000)
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    book.commit([Led(2)])
    for unit in (0, 1, 0):
        more(book, unit)
    assert segment_numbers(tmp_path / "a", "snapshot") == [3, 4]
    assert size(tmp_path, 4) > 5 * CHUNK
    return book


def more(book, unit):
    book.push(0, unit)
    book.ledger.snapshot()


def size(tmp_path, number):
    return snapshot_path(tmp_path / "a", number).stat().st_size


def incoming(place):
    return [path.name for path in place.glob("incoming_*")]


def chunks_for(book, **fields):
    """Return what the leader sends to a follower that has no journal, and of a snapshot what `fields` say."""
    request = pb.TailRequest(term=2, segment=1, **fields)
    stream = journal_stream.stream_journal(book.ledger, request, lambda: None)
    return list(takewhile(lambda chunk: not isinstance(chunk, NoNews), stream))


def snapshot_in(chunks):
    """Return the number and bytes of the snapshot that is sent, and the offset at which it begins."""
    found = [chunk for chunk in chunks if chunk.snapshot]
    assert len({chunk.segment for chunk in found}) == 1
    return found[0].segment, b"".join(chunk.data for chunk in found), found[0].offset


# --- the file


def test_a_part_is_described_by_its_number_its_length_and_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", 4)
    part = PartialSnapshot(tmp_path)
    assert part.received() is None
    part.take(7, 0, b"0123456")
    part.take(7, 7, b"789")
    expected = (7, 10, sha256(b"0123456789").digest())
    assert part.received() == expected
    assert PartialSnapshot(tmp_path).received() == expected, "after a restart of the process"


def test_a_hash_is_of_the_bytes_on_disk(tmp_path):
    part = PartialSnapshot(tmp_path)
    part.take(7, 0, b"0123")
    (tmp_path / "incoming_7").write_bytes(b"0120")
    assert part.received() == (7, 4, sha256(b"0120").digest())


@pytest.mark.parametrize("segment", [7, 8])
def test_the_first_byte_of_a_snapshot_begins_a_new_file(tmp_path, segment):
    part = PartialSnapshot(tmp_path)
    part.take(7, 0, b"0123")
    part.take(segment, 0, b"ab")
    assert part.received() == (segment, 2, sha256(b"ab").digest())
    assert incoming(tmp_path) == [f"incoming_{segment}"]


@pytest.mark.parametrize(("segment", "offset"), [(7, 5), (7, 3), (7, 2**62), (8, 4)])
def test_a_chunk_that_does_not_continue_the_part_is_refused(tmp_path, segment, offset):
    part = PartialSnapshot(tmp_path)
    part.take(7, 0, b"0123")
    with pytest.raises(Damaged, match="goes on at byte"):
        part.take(segment, offset, b"x")


def test_a_whole_snapshot_is_moved_to_its_place_and_only_as_the_one_that_it_is(tmp_path):
    part = PartialSnapshot(tmp_path)
    with pytest.raises(Damaged):
        part.sync(7)
    part.take(7, 0, b"0123")
    with pytest.raises(Damaged, match="segment 8 comes after snapshot 7"):
        part.sync(8)
    part.sync(7)
    part.finish(snapshot_path(tmp_path, 7))
    assert snapshot_path(tmp_path, 7).read_bytes() == b"0123"
    assert part.received() is None
    part.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-00000007"]


def test_a_dropped_part_is_gone_also_after_a_restart(tmp_path):
    part = PartialSnapshot(tmp_path)
    part.take(7, 0, b"0123")
    part.drop()
    assert part.received() is None
    assert PartialSnapshot(tmp_path).received() is None
    assert list(tmp_path.iterdir()) == []


def test_of_two_parts_that_a_failure_has_left_the_one_of_the_higher_number_is_kept(tmp_path):
    for number in (9, 10, 8):
        (tmp_path / f"incoming_{number}").write_bytes(b"%d" % number)
    assert PartialSnapshot(tmp_path).received() == (10, 2, sha256(b"10").digest())
    assert incoming(tmp_path) == ["incoming_10"]


def test_a_part_is_readable_only_by_its_owner_and_a_file_of_another_name_is_left_alone(tmp_path):
    (tmp_path / "incoming_x").write_bytes(b"0")
    part = PartialSnapshot(tmp_path)
    assert part.received() is None
    part.take(7, 0, b"0123")
    assert (tmp_path / "incoming_7").stat().st_mode & 0o777 == 0o600, "it has the seed of the journal"


# --- the transfer


@pytest.mark.parametrize("restart", [False, True])
def test_after_a_cut_only_the_rest_of_a_snapshot_is_sent(book, tmp_path, restart):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    assert follower.snapshot_bytes == 3 * CHUNK
    if restart:
        follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4) - 3 * CHUNK
    assert incoming(tmp_path / "b") == []
    same(follower.mirror.hub, book.hub)


def test_a_snapshot_arrives_although_every_connection_is_cut_after_one_chunk(book, tmp_path):
    sent = 0
    follower = CutFollower(tmp_path / "b")
    while sent < size(tmp_path, 4):
        signs_of_life = -(-sent // 2000)
        follower.follow_for(book.ledger, signs_of_life + 1)
        assert 0 < follower.snapshot_bytes <= CHUNK
        sent += follower.snapshot_bytes
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == 0
    same(follower.mirror.hub, book.hub)


def test_a_leader_of_a_new_term_with_the_same_snapshot_sends_only_the_rest(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 2)
    book.commit([Led(3)])
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4) - 2 * CHUNK
    same(follower.mirror.hub, book.hub)


def test_another_leaders_snapshot_of_that_number_is_sent_whole(book, tmp_path):
    """It holds the same state, in other bytes: its mark is random."""
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 2)
    path = snapshot_path(tmp_path / "a", 4)
    data = path.read_bytes()
    path.unlink()
    book.ledger.store.save(save_state(book.hub.state), 4)
    assert path.read_bytes() != data
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4)
    same(follower.mirror.hub, book.hub)


def test_a_part_with_a_flipped_bit_is_sent_whole(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    path = tmp_path / "b" / "incoming_4"
    data = bytearray(path.read_bytes())
    data[CHUNK + 7] ^= 1
    path.write_bytes(data)
    follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4)
    same(follower.mirror.hub, book.hub)


def test_the_newest_snapshot_is_sent_whole_when_the_one_of_a_part_was_deleted(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    more(book, 1), more(book, 0)
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 6)
    assert incoming(tmp_path / "b") == []
    same(follower.mirror.hub, book.hub)


def test_an_older_snapshot_that_is_still_kept_is_continued(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    more(book, 1)
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4) - 3 * CHUNK
    assert segment_numbers(tmp_path / "b", "journal") == [4, 5]
    same(follower.mirror.hub, book.hub)


def test_an_older_snapshot_without_its_segment_is_not_continued(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    more(book, 1)
    segment_path(tmp_path / "a", 4).unlink()
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 5)
    same(follower.mirror.hub, book.hub)


def test_a_snapshot_that_was_deleted_is_not_continued_although_its_segment_is_there(book, tmp_path):
    data = snapshot_path(tmp_path / "a", 3).read_bytes()[:CHUNK]
    snapshot_path(tmp_path / "a", 3).unlink()
    chunks = chunks_for(book, snapshot_segment=3, snapshot_bytes=CHUNK, snapshot_sha256=sha256(data).digest())
    assert snapshot_in(chunks) == (4, snapshot_path(tmp_path / "a", 4).read_bytes(), 0)


def test_a_snapshot_replaces_the_journal_of_a_follower_that_was_away_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_stream, "_CHUNK_BYTES", CHUNK)
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    for unit in (0, 1, 0):
        more(book, unit)
    follower.follow_for(book.ledger, 3)
    follower.follow_for(book.ledger, 3)
    book.push(0, 1)
    follower.follow(book.ledger)
    assert follower.snapshot_bytes < size(tmp_path, 4)
    kinds = ("snapshot", "journal")
    assert [segment_numbers(tmp_path / "b", kind) for kind in kinds] == [[4], [4]]
    same(follower.mirror.hub, book.hub)
    same(CutFollower(tmp_path / "b").mirror.hub, book.hub)


@pytest.mark.parametrize("restart", [False, True])
def test_a_snapshot_that_is_whole_is_adopted_without_being_sent_again(book, tmp_path, restart):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, -(-size(tmp_path, 4) // CHUNK))
    assert follower.snapshot_bytes == size(tmp_path, 4)
    assert follower.mirror.position == (1, 0), "its segment has not begun"
    if restart:
        follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == 0
    same(follower.mirror.hub, book.hub)


@pytest.mark.parametrize(
    ("segment", "num_bytes", "digest"),
    [
        (3, 5000, sha256(b"invented").digest()),
        (3, 5000, b""),
        (3, 5000, None),
        (3, 0, sha256(b"").digest()),
        (3, 10**9, None),
        (3, 2**64 - 1, b"x" * 1000),
        (5, 5000, b"x" * 32),
        (2**64 - 1, 5000, b"x" * 32),
        (0, 5000, b"x" * 32),
    ],
)
def test_a_follower_that_names_bytes_that_it_does_not_have_gets_the_newest_snapshot_whole(
    book, tmp_path, segment, num_bytes, digest
):
    """None: the right hash, but one byte short; or of all bytes, where more are claimed."""
    if digest is None:
        data = snapshot_path(tmp_path / "a", 3).read_bytes()
        digest = sha256(data).digest() if num_bytes > len(data) else sha256(data[:num_bytes]).digest()[:-1]
    chunks = chunks_for(book, snapshot_segment=segment, snapshot_bytes=num_bytes, snapshot_sha256=digest)
    assert snapshot_in(chunks) == (4, snapshot_path(tmp_path / "a", 4).read_bytes(), 0)
    assert chunks[-1].segment == 4
    assert not chunks[-1].snapshot


def test_a_leader_gives_signs_of_life_while_it_compares_the_bytes_that_the_follower_has(book, tmp_path):
    data = snapshot_path(tmp_path / "a", 4).read_bytes()[:7000]
    chunks = chunks_for(book, snapshot_segment=4, snapshot_bytes=7000, snapshot_sha256=sha256(data).digest())
    assert chunks[:4] == [pb.TailChunk()] * 4, "7000 bytes in pieces of 2000"
    assert (chunks[4].snapshot, chunks[4].offset, chunks[4].segment) == (True, 7000, 4)


def test_a_snapshot_that_is_damaged_once_it_is_whole_is_fetched_anew(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, -(-size(tmp_path, 4) // CHUNK))
    path = tmp_path / "b" / "incoming_4"
    follow = follower._chunks

    def damaging(ledger, request):
        for chunk in follow(ledger, request):
            if not chunk.snapshot and chunk.data and path.exists():
                data = bytearray(path.read_bytes())
                data[-3000] ^= 1
                path.write_bytes(data)
            yield chunk

    follower._chunks = damaging
    with pytest.raises(Damaged) as damaged:
        follower.follow(book.ledger)
    follower._chunks = follow
    follower.standby._fetch_anew(damaged.value)
    assert follower.mirror.partial.received() is None
    assert segment_numbers(tmp_path / "b", "snapshot") == []
    follower.follow(book.ledger)
    assert follower.snapshot_bytes == size(tmp_path, 4)
    same(follower.mirror.hub, book.hub)


def test_a_part_is_dropped_after_a_damaged_chunk(book, tmp_path):
    """Else a leader that goes on at a wrong byte would be asked for the same bytes for ever."""
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    with pytest.raises(Damaged) as damaged:
        follower.mirror.take(pb.TailChunk(segment=4, offset=1, snapshot=True))
    follower.standby._fetch_anew(damaged.value)
    assert incoming(tmp_path / "b") == []


def test_a_snapshot_is_not_adopted_for_the_segment_of_another_number(book, tmp_path):
    follower = CutFollower(tmp_path / "b")
    follower.follow_for(book.ledger, 3)
    data = segment_path(tmp_path / "a", 4).read_bytes()
    with pytest.raises(Damaged, match="segment 5 comes after snapshot 4"):
        follower.mirror.take(pb.TailChunk(segment=5, offset=0, data=data, crc=zlib.crc32(data)))


@pytest.mark.parametrize("goes_on", ["in its segment", "in a new segment"])
def test_a_part_is_deleted_when_the_journal_goes_on_without_it(tmp_path, goes_on):
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    follower.mirror.partial.take(9, 0, b"part")
    if goes_on == "in a new segment":
        book.ledger.journal.rotate()
    else:
        book.push(0, 0)
    follower.follow(book.ledger)
    assert incoming(tmp_path / "b") == []
    same(follower.mirror.hub, book.hub)


def test_a_part_is_deleted_when_the_follower_leads(tmp_path):
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    follower = CutFollower(tmp_path / "b")
    follower.follow(book.ledger)
    follower.mirror.partial.take(9, 0, b"part")
    follower.lead(2)
    assert incoming(tmp_path / "b") == []


def test_a_snapshot_goes_on_over_a_new_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_stream, "_CHUNK_BYTES", 1000)
    with leading_hub(tmp_path, 'standby = "127.0.0.1:1"') as hub:
        node = hub.node().found()
        for _ in range(2):
            node.merged(0)
            hub.leading.ledger.snapshot()
        for _ in range(2):
            hub.leading.ledger.snapshot()
        number = segment_numbers(tmp_path / "hub", "snapshot")[-1]
        whole = snapshot_path(tmp_path / "hub", number).read_bytes()
        part = PartialSnapshot(tmp_path)
        for num_chunks in (3, 5):
            client = hub.client()
            request = pb.TailRequest(term=1, segment=1)
            if received := part.received():
                assert received[:2] == (number, 3000)
                request.snapshot_segment, request.snapshot_bytes, request.snapshot_sha256 = received
            chunks = (chunk for chunk in client.tail(request) if chunk.snapshot)
            for chunk in islice(chunks, num_chunks):
                part.take(chunk.segment, chunk.offset, chunk.data)
            client.close()
        assert part.received() == (number, 8000, sha256(whole[:8000]).digest())


def test_a_snapshot_over_a_link_that_is_cut_every_250_kb_goes_on_after_each_cut(tmp_path):
    with leading_hub(tmp_path, 'standby = "127.0.0.1:1"') as hub:
        node = hub.node(numels=(200_000, 70)).found()
        node.merged(0)
        for _ in range(2):
            hub.leading.ledger.snapshot()
        number = segment_numbers(tmp_path / "hub", "snapshot")[-1]
        whole = snapshot_path(tmp_path / "hub", number).read_bytes()
        assert len(whole) > 1_000_000
        part, reached, errors = PartialSnapshot(tmp_path), [0], []
        with cutting(hub.address) as (address, _):
            while reached[-1] < len(whole):
                client = HubClient(address, call_timeout_s=10.0)
                request = pb.TailRequest(term=1, segment=1)
                if received := part.received():
                    request.snapshot_segment, request.snapshot_bytes, request.snapshot_sha256 = received
                try:
                    for chunk in takewhile(
                        lambda chunk: chunk.snapshot or not chunk.segment, client.tail(request)
                    ):
                        if chunk.snapshot:
                            part.take(chunk.segment, chunk.offset, chunk.data)
                except HubUnreachable as error:
                    errors.append(str(error))
                client.close()
                reached.append(part.received()[1])
                assert reached[-1] >= reached[-2], "no call begins anew"
                assert len(reached) < 40
        assert part.received() == (number, len(whole), sha256(whole).digest())
        assert len(errors) >= 4
        assert any(re.search(r"asked to tail, after \d+ bytes: .*connection was cut", e) for e in errors)
        assert not any("TLS" in each for each in errors)
