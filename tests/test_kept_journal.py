"""Tests that a follower keeps the records that a new leader has too, and no others."""

import errno
import os
import shutil
import zlib
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from test_journal import Book, config, same

from aedit.async_sgd.journal import (
    FILE_BYTES,
    NOTE,
    Damaged,
    Ledger,
    Store,
    begin_after,
    moved_aside,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.async_sgd.journal.encoding import encode_records
from aedit.async_sgd.replication import Leadership, Mirror, stream_journal
from aedit.async_sgd.rules import Led
from aedit.launch.hub.folder import make_hub
from aedit.launch.hub.standby import Standby
from aedit.proto.rpc import HubUnreachable, NoNews, Proposal
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError


class Follower:
    """A standby over a folder, without threads. Its leaders are ledgers in this process."""

    def __init__(self, place):
        place.mkdir(exist_ok=True)
        self.mirror = Mirror(Store(place), lambda: make_hub(config(), (0, 1)))
        endpoint = SimpleNamespace(config=config(), directory=place, replicas=None, others=())
        votes = Leadership(place / "votes.json", 1)
        others = SimpleNamespace(endpoint=endpoint, check_leader=lambda leader, event: None)
        self.standby = Standby(others, self.mirror, SimpleNamespace(event=None), None, votes, None)
        self.bytes = self.differed = 0

    def follow(self, ledger):
        """Mirror all that a leader has; count the bytes that this took."""
        self.bytes = self.differed = 0
        term = ledger.hub.state.term
        while not self.standby._tail(
            SimpleNamespace(tail=lambda request: self._chunks(ledger, request)), term, "h:1"
        ):
            pass
        while self.mirror.apply():
            pass

    def _chunks(self, ledger, request):
        stream = stream_journal(ledger, request, lambda: None)
        for chunk in takewhile(lambda chunk: not isinstance(chunk, NoNews), stream):
            self.bytes += len(chunk.data)
            self.differed += chunk.differs
            yield chunk

    def lead(self, term):
        """Return the ledger of this follower, which leads from now on."""
        ledger = Ledger(self.mirror.hub, self.mirror.journal(), self.mirror._store, clock=lambda: 0.0)
        ledger.durable(ledger.commit([Led(term)]))
        return ledger


@pytest.fixture
def book(tmp_path):
    (tmp_path / "a").mkdir()
    return Book(tmp_path / "a").join("a")


def bytes_of(place):
    return {number: segment_path(place, number).read_bytes() for number in segment_numbers(place, "journal")}


def test_what_a_new_leader_has_too_is_not_sent_again(book, tmp_path):
    short, long = (Follower(tmp_path / name) for name in "bc")
    short.follow(book.ledger)
    book.push(0, 0)
    long.follow(book.ledger)
    whole = long.mirror.position[1]
    leader = long.lead(2)
    short.follow(leader)
    assert (short.differed, short.mirror.position) == (0, leader.journal.position)
    assert 0 < short.bytes < leader.journal.position[1] - 1000
    assert begin_after(tmp_path / "c", 1) == ((1, whole), False)
    assert bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")
    same(short.mirror.hub, leader.hub)


@pytest.mark.parametrize("segments", [1, 2])
def test_what_a_new_leader_lacks_is_cut_off_and_the_state_with_it(book, tmp_path, segments):
    """Of two followers the one that has less may be elected: what only the other has is not acknowledged."""
    short, long = (Follower(tmp_path / name) for name in "bc")
    short.follow(book.ledger)
    kept = short.mirror.position
    book.push(0, 0)
    for _ in range(segments - 1):
        book.ledger.snapshot()
        book.push(0, 1)
    long.follow(book.ledger)
    assert long.mirror.hub.state.units[0].version > short.mirror.hub.state.units[0].version
    leader = short.lead(2)
    long.follow(leader)
    assert (long.differed, long.mirror.position) == (1, leader.journal.position)
    assert long.bytes == leader.journal.position[1] - kept[1]
    same(long.mirror.hub, leader.hub)
    again = Follower(tmp_path / "c")
    assert bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")
    same(again.mirror.hub, leader.hub)


def test_a_leader_that_has_only_the_head_of_the_newest_segment_keeps_it(book, tmp_path):
    """Found in simulation: it wrote another head, so that nodes proved to it the loss of what it had."""
    follower = Follower(tmp_path / "b")
    book.push(0, 0)
    book.ledger.snapshot()
    follower.follow(book.ledger)
    end = book.ledger.journal.position
    assert follower.mirror.sync() == end == (2, FILE_BYTES), "this is confirmed, and can be acknowledged"
    receipt = book.ledger.receipts.give(book.ledger.journal.sync(end))
    leader = follower.lead(2)
    assert not leader.receipts.lacks(receipt)
    assert bytes_of(tmp_path / "b")[2].startswith(bytes_of(tmp_path / "a")[2])


def test_a_copy_that_lost_records_in_a_power_failure_is_cut_off_and_fetched_again(book, tmp_path):
    """Found in simulation: frames say what the leader has on disk, and the follower refused its folder."""
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    kept = follower.mirror.position
    for _ in range(3):
        book.push(0, 0)
        book.ledger.durable(book.ledger.journal.position)
    follower.follow(book.ledger)
    end = follower.mirror.position
    with segment_path(tmp_path / "b", 1).open("r+b") as file:
        file.seek(kept[1])
        file.write(bytes(8))  # a page that was not written, before one that was
    with pytest.raises(UserError, match="it was whole before"):
        Store(tmp_path / "b").recover(make_hub(config(), (0, 1)))
    store, hub = Store(tmp_path / "b"), make_hub(config(), (0, 1))
    assert store.recover(hub, is_copy=True).position == kept
    assert store.lost_end == end, "this hub is no candidate before it has as much again"
    again = Follower(tmp_path / "b")
    again.follow(book.ledger)
    same(again.mirror.hub, book.hub)


def test_a_copy_whose_segment_lost_its_head_in_a_power_failure_is_fetched_again(book, tmp_path):
    """Found in simulation: the follower refused its folder, as later bytes of the segment were on disk."""
    Follower(tmp_path / "b").follow(book.ledger)
    path = segment_path(tmp_path / "b", 1)
    end = 1, path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(FILE_BYTES))
    store = Store(tmp_path / "b")
    store.recover(make_hub(config(), (0, 1)), is_copy=True)
    assert store.lost_end == end, "this hub is no candidate before it has as much again"
    again = Follower(tmp_path / "b")
    again.follow(book.ledger)
    same(again.mirror.hub, book.hub)


def test_a_hub_that_ended_as_it_began_a_segment_goes_on_with_the_one_before(book, tmp_path):
    """It began another journal, to which no receipt belonged."""
    before = book.ledger.journal.epoch, book.ledger.journal.position
    segment_path(tmp_path / "a", 2).touch()
    again = Book(tmp_path / "a")
    assert (again.ledger.journal.epoch, again.ledger.journal.position) == before
    same(again.hub, book.hub)


def test_a_leader_that_was_replaced_follows_with_what_it_has_in_common(book, tmp_path):
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    book.push(0, 0)
    leader = follower.lead(2)
    former = Follower(tmp_path / "a")
    former.follow(leader)
    assert former.differed == 1
    assert former.bytes < 200
    same(former.mirror.hub, leader.hub)


def test_a_term_of_which_the_leader_has_no_record_is_cut_off(book, tmp_path):
    """It ended before anybody else had a record of it; the leader has more of the term before."""
    other, follower = (Follower(tmp_path / name) for name in "bc")
    book.commit([Led(1)])
    other.follow(book.ledger)
    common = other.mirror.position
    book.push(0, 0)
    follower.follow(book.ledger)
    alone = other.lead(7)
    while alone.journal.position <= follower.mirror.position:
        alone.commit([Led(7)])
    leader = follower.lead(8)
    former = Follower(tmp_path / "b")
    former.follow(leader)
    assert former.differed == 1
    assert former.bytes == leader.journal.position[1] - common[1]
    same(former.mirror.hub, leader.hub)


def test_records_of_another_journal_are_fetched_anew(book, tmp_path):
    """The other one even has a term that begins behind the end of these."""
    (tmp_path / "other").mkdir()
    other = Book(tmp_path / "other").join("a")
    for _ in range(3):
        other.push(0, 1)
    other.commit([Led(2)])
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    follower.follow(other.ledger)
    assert follower.differed == 1
    assert follower.bytes == other.ledger.journal.position[1]
    same(follower.mirror.hub, other.hub)
    assert follower.standby._leadership._replica.voter.seen > (0, 0, 0), "no candidate before it has as much"


def test_a_journal_that_its_leader_lacks_under_the_same_term_is_set_aside_whole(book, tmp_path):
    """Found: an older copy of the leader's folder, put back, had its follower delete everything."""
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    shutil.copytree(tmp_path / "a", tmp_path / "older")
    book.push(0, 0)
    book.ledger.snapshot()
    book.push(0, 1)
    follower.follow(book.ledger)
    before = files_of(tmp_path / "b")
    follower = Follower(tmp_path / "b")
    hub, store = make_hub(config(), (0, 1)), Store(tmp_path / "older")
    older = Ledger(hub, store.recover(hub), store, clock=lambda: 0.0)
    follower.follow(older)
    same(follower.mirror.hub, older.hub)
    assert files_of(tmp_path / "b" / "set_aside" / "1") == before
    assert [one["path"] for one in moved_aside(tmp_path / "b")] == [str(tmp_path / "b" / "set_aside" / "1")]
    assert moved_aside(tmp_path / "b")[0]["bytes"] >= sum(map(len, before.values()))
    restored = make_hub(config(), (0, 1))
    Store(tmp_path / "b" / "set_aside" / "1").recover(restored)
    same(restored, book.hub)


def test_the_end_that_is_cut_off_is_set_aside(book, tmp_path):
    short, long = (Follower(tmp_path / name) for name in "bc")
    short.follow(book.ledger)
    kept = short.mirror.position
    book.push(0, 0)
    long.follow(book.ledger)
    whole = bytes_of(tmp_path / "c")[1]
    long.follow(short.lead(2))
    assert long.differed == 1
    tail = tmp_path / "c" / "set_aside" / "1" / f"{segment_path(tmp_path, 1).name}.from-{kept[1]}"
    assert bytes_of(tmp_path / "b")[1][: kept[1]] + tail.read_bytes() == whole


def test_every_damaged_copy_is_set_aside_also_if_one_leader_has_sent_all_of_it(book, tmp_path):
    """That leader may come back under its term with an older folder, and lack what this copy has."""
    follower = Follower(tmp_path / "b")
    for count in range(1, 4):
        book.push(0, 0)
        follower.follow(book.ledger)
        before = files_of(tmp_path / "b")
        follower.standby._fetch_anew(Damaged("a bit has flipped"))
        assert files_of(tmp_path / "b" / "set_aside" / str(count)) == before
    follower.follow(book.ledger)
    same(follower.mirror.hub, book.hub)


def test_what_an_older_leader_lacks_is_set_aside_also_after_all_was_fetched_from_it(book, tmp_path):
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    follower.standby._fetch_anew(Damaged("a bit has flipped"))
    shutil.copytree(tmp_path / "a", tmp_path / "older")
    book.push(0, 0)
    follower.follow(book.ledger)
    whole = bytes_of(tmp_path / "b")[1]
    hub, store = make_hub(config(), (0, 1)), Store(tmp_path / "older")
    older = Ledger(hub, store.recover(hub), store, clock=lambda: 0.0)
    follower.follow(older)
    same(follower.mirror.hub, older.hub)
    assert bytes_of(tmp_path / "b" / "set_aside" / "2")[1] == whole


def test_a_follower_confirms_under_the_term_of_the_journal_that_it_gets(book, tmp_path):
    """Found in simulation: its leader was elected again between two calls, and did not count it any more."""
    follower = Follower(tmp_path / "b")
    book.commit([Led(2)])
    for chunk in (*follower._chunks(book.ledger, follower.standby.tail_request(1)), pb.TailChunk()):
        follower.standby.take(chunk, 1, "h:1")
        while follower.mirror.apply():
            pass
    assert follower.standby.term == 2


@pytest.mark.parametrize("full", [False, True])
def test_records_are_set_aside_whole_or_stay(book, tmp_path, full):
    follower = Follower(tmp_path / "b")
    book.push(0, 0)
    follower.follow(book.ledger)
    before, (segment, end) = files_of(tmp_path / "b"), follower.mirror.position
    error = OSError(errno.ENOSPC, "full")
    with mock.patch("shutil.copyfileobj", side_effect=error if full else None), suppress(OSError):
        follower.mirror.cut((segment, end - 1))
    assert (files_of(tmp_path / "b") == before) == full
    assert len(moved_aside(tmp_path / "b")) == (not full)


@pytest.mark.parametrize("moved", range(4))
def test_a_crash_while_records_are_set_aside_leaves_a_journal(book, tmp_path, monkeypatch, moved):
    follower = Follower(tmp_path / "b")
    for _ in range(2):
        book.push(0, 0)
        follower.follow(book.ledger)
        book.ledger.snapshot()
    book.push(0, 0)
    follower.follow(book.ledger)
    before = files_of(tmp_path / "b").keys()
    assert len(before) == 4
    rename, names = Path.rename, []

    def crashing(path, to):
        if len(names) == moved:
            raise InterruptedError("killed")
        names.append(path.name)
        rename(path, to)

    (tmp_path / "b" / NOTE).unlink(missing_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crashing)
        with pytest.raises(InterruptedError):
            follower.mirror.forget()
    kept = sorted(files_of(tmp_path / "b").keys() | names)
    assert kept == sorted(before)
    Follower(tmp_path / "b").follow(book.ledger)
    same(follower_hub(tmp_path / "b"), book.hub)


def follower_hub(place):
    Store(place).recover(hub := make_hub(config(), (0, 1)))
    return hub


def files_of(place):
    return {
        path.name: path.read_bytes() for kind in ("snapshot", "journal") for path in place.glob(f"{kind}-*")
    }


def test_an_incomplete_end_is_cut_off_before_it_is_compared(book, tmp_path):
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    whole = follower.mirror.position
    book.push(0, 0)
    piece = book.ledger.journal.file.read(whole[1], 70)
    follower.mirror.take(pb.TailChunk(segment=1, offset=whole[1], data=piece, crc=zlib.crc32(piece)))
    assert follower.mirror.trim()[0] == whole
    follower.follow(book.ledger)
    assert follower.differed == 0
    same(follower.mirror.hub, book.hub)


def test_a_snapshot_alone_is_fetched_again_under_another_term(book, tmp_path):
    book.commit([Led(2)])
    for unit in (0, 1, 0):
        book.push(0, unit)
        book.ledger.snapshot()
    follower = Follower(tmp_path / "b")
    chunks = follower._chunks(book.ledger, pb.TailRequest(segment=1))
    for chunk in chunks:
        if not chunk.snapshot:
            break
        follower.mirror.take(chunk)
    head = chunk.data[:7]
    follower.mirror.take(pb.TailChunk(segment=chunk.segment, offset=0, data=head, crc=zlib.crc32(head)))
    assert follower.mirror.trim() == ((chunk.segment, 0), b"")
    saved = snapshot_path(tmp_path / "a", chunk.segment).stat().st_size
    follower.follow(book.ledger)
    assert follower.bytes == saved + book.ledger.journal.position[1]
    same(follower.mirror.hub, book.hub)


def test_a_part_of_a_snapshot_is_not_adopted_when_the_journal_goes_on_without_one(book, tmp_path):
    """The connection was lost in the middle of it, and the next leader still has the follower's segment."""
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    book.push(0, 0)
    book.ledger.snapshot()
    piece = snapshot_path(tmp_path / "a", 2).read_bytes()[:100]
    follower.mirror.take(pb.TailChunk(segment=2, offset=0, data=piece, crc=zlib.crc32(piece), snapshot=True))
    follower.follow(book.ledger)
    same(follower.mirror.hub, book.hub)


def test_the_begin_of_a_term_is_found_in_any_segment_and_in_one_that_is_being_written(book, tmp_path):
    place = tmp_path / "a"
    at = book.ledger.journal.position
    book.commit([Led(5)])
    assert begin_after(place, 4) == (at, False)
    book.ledger.journal.rotate()
    book.push(0, 0)
    assert begin_after(place, 4) == (at, False)
    frame = encode_records([Led(6)])
    end = book.ledger.journal.position
    book.ledger.journal.file.write(end[1], frame[:7])
    assert begin_after(place, 4) == (at, False)
    assert begin_after(place, 5) == ((0, 0), False)
    book.commit([Led(8)])
    assert begin_after(place, 5)[1] is False
    assert begin_after(place, 6)[1] is True, "terms 6 and 7 are not there"


@pytest.mark.parametrize("arrived", ["with its head", "empty"])
def test_a_follower_that_restarts_just_after_it_has_adopted_a_snapshot_loses_nothing(book, tmp_path, arrived):
    """Found: it took a segment with a head alone for one of its own, and fetched all that it had anew."""
    for unit in (0, 1, 0):
        book.push(0, unit)
        book.ledger.snapshot()
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    fetched, (segment, _) = follower.bytes, follower.mirror.position
    if arrived == "empty":
        os.truncate(segment_path(tmp_path / "b", segment), 0)
    again = Follower(tmp_path / "b")
    again.follow(book.ledger)
    assert (again.differed, again.bytes) == ((0, 0) if arrived == "with its head" else (1, fetched))
    book.push(0, 1)
    again.follow(book.ledger)
    assert again.mirror.position == book.ledger.journal.position
    same(again.mirror.hub, book.hub)


@pytest.mark.parametrize("lacks", [False, True])
def test_a_journal_is_set_aside_before_a_snapshot_that_lacks_its_pushes(book, tmp_path, lacks):
    """The leader has deleted the segment with which it would compare it; its folder was an older copy."""
    follower = Follower(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "older")
    book.push(0, 0)
    follower.follow(book.ledger)
    before = files_of(tmp_path / "b")
    leader = Book(tmp_path / ("older" if lacks else "a"))
    for _ in range(2):
        leader.ledger.snapshot()
    assert not segment_path(leader.ledger.journal.directory, 1).exists()
    follower.follow(leader.ledger)
    same(follower.mirror.hub, leader.hub)
    assert len(moved_aside(tmp_path / "b")) == lacks
    if lacks:
        assert files_of(tmp_path / "b" / "set_aside" / "1") == before


def test_a_follower_that_may_not_confirm_looks_for_a_leader_again(book, tmp_path):
    """Found by simulation: a leader with its lease never learned of the promise, nor counted the replica."""
    follower = Follower(tmp_path / "b")
    follower.follow(book.ledger)
    standby, votes = follower.standby, follower.standby._leadership
    votes.leader_ended()
    assert votes.answer(Proposal(2, 0, 5, (0, 0))).granted
    assert standby.take(pb.TailChunk(), 1, "h:1"), "its confirmation may be on its way"
    standby.confirmer._last_s -= 60.0
    with pytest.raises(HubUnreachable, match="has promised term 2"):
        standby.take(pb.TailChunk(), 1, "h:1")
    assert standby.take(pb.TailChunk(), 2, "h:1"), "a leader of that term is followed"
