"""Tests that a journal restores a hub after damage to the file's end, and that other damage is refused."""

import json
import os
import shutil
import threading
import zlib
from contextlib import nullcontext

import numpy as np
import pytest

from aedit.async_sgd.hub import Joiner
from aedit.async_sgd.journal import (
    Damaged,
    File,
    Journal,
    Ledger,
    NoSpace,
    Payload,
    Store,
    batches,
    check_payloads,
    frames,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.async_sgd.journal.encoding import decode_records, encode_records
from aedit.async_sgd.journal.snapshot import read_snapshot
from aedit.async_sgd.replication import Mirror
from aedit.async_sgd.rules import HubConfig, MergePart, OuterConfig, Push, records
from aedit.edit import EditConfig
from aedit.launch.config import RunConfig
from aedit.launch.hub import folder
from aedit.launch.hub.folder import make_hub
from aedit.proto.codecs import codec
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import Layout, TensorLayout, UnitLayout, UserError

NUMELS = (3000, 50)
LAYOUT = Layout(tuple(UnitLayout(f"u{i}", (TensorLayout("w", (n,)),)) for i, n in enumerate(NUMELS)))


def config(quorum=1):
    return RunConfig(
        hub=HubConfig(address="127.0.0.1:0", codec="int8", codec_down="e3m0", quorum=quorum),
        outer=OuterConfig(kind="delayed-nesterov", delay=2),
        edit=EditConfig(every=10, landing="arrival"),
    )


class Book:
    """Ledger over a folder, and one node whose pushes are computed from (unit, seq)."""

    def __init__(self, directory, quorum=1):
        self.hub = make_hub(config(quorum), (0, 1))
        self.store = Store(directory, fsync=True)
        self.now = 0.0
        self.ledger = Ledger(self.hub, self.store.recover(self.hub), self.store, clock=lambda: self.now)

    def join(self, *names):
        for name in names:
            joiner = Joiner(name=name, layout=LAYOUT, facts=(("seed", "0"),), num_samples=99)
            self.commit(self.hub.join(joiner, self.now))
        for unit in range(len(NUMELS)):
            self.push(0, unit, base=0)
        return self

    def push(self, node, unit, base=None):
        seq = self.hub.state.members[node].received.get(unit, 0) + 1
        values = np.random.default_rng([node, unit, seq]).standard_normal(NUMELS[unit], dtype=np.float32)
        name = "fp32" if base == 0 else "int8"
        data = codec(name).encode(values)
        payload = self.ledger.store_payload(name, NUMELS[unit], zlib.crc32(data), data)
        push = Push(
            node=node,
            unit=unit,
            seq=seq,
            base=self.hub.state.units[unit].version if base is None else base,
            steps=2,
            tokens=20,
            values=payload,
            norms=(float(np.linalg.norm(values)),),
        )
        self.commit(self.hub.offer(push, self.now))
        self.merge()

    def merge(self):
        self.now += 0.5
        while decided := self.hub.tick(self.now):
            self.commit(decided)

    def commit(self, decided):
        for record in decided:
            self.ledger.durable(self.ledger.commit([record], self.hub.compute(record)))


def same(hub, other):
    """Return whether two hubs have equal bits."""
    assert hub.state.units.keys() == other.state.units.keys()
    for index, unit in hub.state.units.items():
        twin = other.state.units[index]
        assert (unit.version, list(unit.pending)) == (twin.version, list(twin.pending))
        for mine, theirs in zip(_arrays(unit), _arrays(twin), strict=True):
            assert np.array_equal(mine, theirs)
        for mine, theirs in zip(unit.pending.values(), twin.pending.values(), strict=True):
            assert np.array_equal(mine.values.read(0, NUMELS[index]), theirs.values.read(0, NUMELS[index]))
    assert hub.state.members == other.state.members
    assert hub.state.pool == other.state.pool
    assert (hub.state.elapsed_s, hub.state.mean_steps) == (other.state.elapsed_s, other.state.mean_steps)


def _arrays(unit):
    if unit.anchor is None:
        return []
    return [unit.anchor.values, *unit.anchor.outer.arrays, unit.anchor.handed]


def reopened(directory):
    hub = make_hub(config(), (0, 1))
    Store(directory).recover(hub)
    return hub


def test_every_kind_of_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "payloads"
    path.write_bytes(b"0123456789abcdef")
    values = Payload("fp32", 2, 7, File(path), 4, 8)
    push = Push(
        node=3, unit=1, seq=9, base=4, steps=5, tokens=60, values=values, norms=(1.5, float("inf"), 0.1)
    )
    batch = [
        records.Founded(LAYOUT, (("seed", "0"), ("model", "x")), 12),
        records.Joined("a \N{SNOWMAN}", 0, 1, "host:1", 0.1),
        records.Left(0, "left", excluded=True),
        records.Accepted(push),
        records.Refused(1, 2, 3, "norm: much", True, False),
        records.Garbled(1, 2, "damaged: chunk at byte 0"),
        records.Merged(1, 5, (MergePart(3, 9, 0.1, 0.7, 2), MergePart(4, 1, 0.0)), 1 / 3),
        records.Mixed(1, 6, values, 0.25),
        records.SentUp(1, 6),
        records.RoundOpened(4, 2.5),
        records.Leased(1, 0, 10),
        records.Used(1, 0, 5),
        records.Led(2),
        records.Configured(2, 1, 2**62, (3, 2**62), (5, 2**61)),
        records.Agreed(2, 1),
        records.Ticked(9.25),
        records.Banned("alpha", "00ff", "accused by 1 of 1 nodes", 7.5),
    ]
    assert {type(record) for record in batch} == set(records.Record.__args__)
    place = {"codec": "fp32", "numel": 2, "crc": 7, "at": 4, "length": 8}
    assert json.loads(encode_records(batch))[3]["values"] == place
    assert decode_records(encode_records(batch), values.file) == batch


@pytest.mark.parametrize("quorum", [1, "all"])
def test_a_hub_comes_back_with_equal_bits(tmp_path, quorum):
    book = Book(tmp_path, quorum).join("a", "b")
    for _ in range(4):
        book.push(0, 0)
        book.push(1, 1)
    same(book.hub, reopened(tmp_path))


def test_a_snapshot_and_what_came_after_it_give_equal_bits_and_waiting_pushes_stay(tmp_path):
    book = Book(tmp_path, quorum="all").join("a", "b")
    book.push(0, 0)  # waits for the other node
    assert book.hub.state.units[0].pending
    book.ledger.snapshot()
    same(book.hub, reopened(tmp_path))
    book.push(1, 0)
    assert not book.hub.state.units[0].pending
    same(book.hub, reopened(tmp_path))


def test_what_two_snapshots_have_made_unnecessary_is_deleted(tmp_path):
    book = Book(tmp_path).join("a")
    for _ in range(4):
        book.push(0, 0)
        book.ledger.snapshot()
    assert segment_numbers(tmp_path, "snapshot") == [4, 5]
    assert segment_numbers(tmp_path, "journal") == [4, 5]
    same(book.hub, reopened(tmp_path))


def test_replaying_from_the_beginning_gives_what_a_snapshot_gives(tmp_path):
    book = Book(tmp_path).join("a")
    book.push(0, 0)
    book.ledger.snapshot()
    book.push(0, 1)
    (copy := tmp_path / "copy").mkdir()
    for number in (1, 2):
        shutil.copy(segment_path(tmp_path, number), copy)
    same(book.hub, reopened(copy))


def test_wherever_the_file_is_cut_an_older_state_comes_back(tmp_path):
    """States are those after each batch: a cut within one restores the one before."""
    (tmp_path / "hub").mkdir()
    book = Book(tmp_path / "hub").join("a")
    for _ in range(2):
        book.push(0, 1)
    path = segment_path(tmp_path / "hub", 1)
    ends = [end for _, end in batches(File(path))]
    whole = path.read_bytes()
    versions = []
    cuts = sorted(
        {0, 1, frames.FILE_BYTES - 1, *ends, *(end - 1 for end in ends), *(end + 9 for end in ends)}
    )
    for cut in cuts:
        (place := tmp_path / f"cut-{cut}").mkdir()
        segment_path(place, 1).write_bytes(whole[:cut])
        hub = reopened(place)
        versions.append(sum(unit.version for unit in hub.state.units.values()))
        # Goes on from there.
        journal = Journal(place, 1, fsync=True)
        journal.append(encode_records([records.Led(77)]))
        assert reopened(place).state.term == 77
    assert versions == sorted(versions)
    assert versions[-1] == sum(unit.version for unit in book.hub.state.units.values())


def test_a_damaged_middle_is_refused_wherever_it_is(tmp_path):
    book = Book(tmp_path).join("a")
    book.push(0, 1)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    ends = [end for batch, end in batches(File(path)) if batch]
    payloads = [frame.offset for frame, _ in frames.frames(File(path)) if frame.kind == frames.PAYLOAD]
    for place in (frames.FILE_BYTES + 3, *(end + 20 for end in ends[:-2]), *payloads):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="restore"):
            reopened(tmp_path)
    path.write_bytes(whole)
    same(book.hub, reopened(tmp_path))


def test_damage_behind_what_was_acknowledged_is_cut_off(tmp_path):
    """After a power cut unacknowledged pages may be missing, even before others that were written."""
    journal = Journal(tmp_path, 1, fsync=True)
    journal.sync(journal.append(encode_records([records.Led(1)])))
    middle = journal.append(encode_records([records.Led(2)]))[1]
    journal.append(encode_records([records.Led(3)]))
    data = bytearray(segment_path(tmp_path, 1).read_bytes())
    data[middle - 5 : middle] = bytes(5)
    segment_path(tmp_path, 1).write_bytes(data)
    hub = reopened(tmp_path)
    assert hub.state.term == 1


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_follower_does_not_go_on_behind_a_payload_that_its_disk_has_lost(tmp_path, is_torn):
    """Found in simulation: it confirmed the push, and its next version was computed from other values."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    book = Book(tmp_path / "a").join("a")
    book.push(0, 0)
    file = File(segment_path(tmp_path / "a", 1))
    end = max(frame.end for frame, _ in frames.frames(file) if frame.kind == frames.PAYLOAD)

    def sent(mirror, upto):
        start = mirror.position[1]
        data = file.read(start, upto - start)
        mirror.take(pb.TailChunk(segment=1, offset=start, data=data, crc=zlib.crc32(data)))
        while mirror.apply():
            pass

    def make():
        return make_hub(config(), (0, 1))

    first = Mirror(Store(tmp_path / "b"), make)
    sent(first, end)
    first.sync()
    if is_torn:  # pages behind others are on disk, and these are not
        with segment_path(tmp_path / "b", 1).open("r+b") as copy:
            copy.seek(end - 100)
            copy.write(bytes(100))
    again = Mirror(Store(tmp_path / "b"), make)
    assert again.position == (1, end)
    if is_torn:
        with pytest.raises(Damaged, match="an accepted push is damaged"):
            sent(again, file.num_bytes)
    else:
        sent(again, file.num_bytes)
        same(book.hub, again.hub)


def test_values_of_a_parent_hub_are_compared_with_their_checksum_as_those_of_pushes_are(tmp_path):
    """A machine without power may have the record, and not all of the values."""
    path = tmp_path / "payloads"
    path.write_bytes(b"0123456789abcdef")
    for crc, is_whole in ((zlib.crc32(b"456789ab"), True), (7, False)):
        values = Payload("fp32", 2, crc, File(path), 4, 8)
        push = Push(node=3, unit=1, seq=9, base=4, steps=5, tokens=60, values=values, norms=(1.5,))
        for record in (records.Accepted(push), records.Mixed(1, 6, values, 0.25)):
            check_payloads([record], before=4)
            with nullcontext() if is_whole else pytest.raises(Damaged):
                check_payloads([record], before=5)
            with nullcontext() if is_whole else pytest.raises(Damaged):
                check_payloads([record])


def test_a_missing_or_shortened_segment_is_refused(tmp_path):
    book = Book(tmp_path).join("a")
    book.ledger.journal.rotate()
    book.push(0, 0)
    os.truncate(segment_path(tmp_path, 1), segment_path(tmp_path, 1).stat().st_size - 1)
    with pytest.raises(UserError, match="cut off or replaced"):
        reopened(tmp_path)
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(UserError, match="not all from 1 on"):
        reopened(tmp_path)


def test_a_snapshot_that_was_cut_or_damaged_anywhere_leaves_the_one_before(tmp_path):
    book = Book(tmp_path).join("a")
    book.ledger.snapshot()
    book.push(0, 0)
    book.ledger.snapshot()
    book.push(0, 1)
    path = snapshot_path(tmp_path, 3)
    whole = path.read_bytes()
    for cut in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:cut])
        same(book.hub, reopened(tmp_path))
        damaged = bytearray(whole)
        damaged[cut] ^= 4
        path.write_bytes(damaged)
        same(book.hub, reopened(tmp_path))
    path.unlink()
    path.with_name(path.name + ".new").write_bytes(whole[: len(whole) // 2])  # a crash while it was written
    same(book.hub, reopened(tmp_path))
    assert not list(tmp_path.glob("*.new"))


def test_only_a_snapshot_is_read_as_one(tmp_path):
    book = Book(tmp_path).join("a")
    book.ledger.snapshot()
    saved = read_snapshot(snapshot_path(tmp_path, 2))
    assert [unit.index for unit in saved[1]] == [0, 1]
    with pytest.raises(Damaged):
        read_snapshot(segment_path(tmp_path, 1))


def test_payloads_are_written_beside_each_other_and_beside_records(tmp_path):
    journal = Journal(tmp_path, 1, fsync=True)
    payloads = [os.urandom(200_000 + i) for i in range(12)]
    stored = {}

    def store(i):
        stored[i] = journal.store(memoryview(payloads[i]))
        journal.sync(journal.append(encode_records([records.Led(i)])))

    threads = [threading.Thread(target=store, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for i, (file, offset) in stored.items():
        assert file.read(offset, len(payloads[i])) == payloads[i]
    terms = [record.term for batch, _ in batches(File(segment_path(tmp_path, 1))) for record in batch]
    assert sorted(terms) == list(range(12))
    assert journal.complete == journal.position


def test_what_a_payload_contains_can_not_look_like_a_frame(tmp_path):
    """In the gap left by a torn payload it would be taken for a later frame that confirms the gap."""
    journal = Journal(tmp_path, 1, fsync=True)
    journal.sync(journal.append(encode_records([records.Led(1)])))
    body = encode_records([records.Led(9)])
    forged = frames.frame_header(b"mark", frames.RECORDS, len(body), zlib.crc32(body), 2**40) + body
    _, offset = journal.store(memoryview(forged * 100))
    data = bytearray(segment_path(tmp_path, 1).read_bytes())
    start = offset - frames.FRAME_BYTES
    data[start:offset] = bytes(frames.FRAME_BYTES)  # its header never came to the disk
    segment_path(tmp_path, 1).write_bytes(data)
    assert reopened(tmp_path).state.term == 1


def test_a_full_disk_takes_nothing_half(tmp_path, monkeypatch):
    book = Book(tmp_path).join("a")
    path = segment_path(tmp_path, 1)
    size, true = path.stat().st_size, os.pwrite

    def full(fd, data, offset):
        if len(data) != frames.FRAME_BYTES:  # room for the header, and for some of what follows
            true(fd, bytes(data)[:7], offset)
            raise OSError(28, "No space left on device")
        return true(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace, match="no space"):
        book.push(0, 0)
    with pytest.raises(NoSpace):
        book.ledger.commit([records.Led(5)])
    monkeypatch.undo()
    assert path.stat().st_size == size
    assert book.hub.state.term == 0
    book.push(0, 0)
    same(book.hub, reopened(tmp_path))


def test_a_record_in_the_place_of_a_payload_that_was_given_up_during_a_flush_is_flushed_too(
    tmp_path, monkeypatch
):
    """The flush knows of the payload's bytes. They are taken back before it ends, and used again."""
    journal = Journal(tmp_path, 1, fsync=True)
    position = journal.append(b"[]")
    writing, goes_on, flushes = threading.Event(), threading.Event(), []
    true, flush = os.pwrite, os.fdatasync

    def full(fd, data, offset):
        if len(data) < 2000:
            return true(fd, data, offset)
        writing.set()
        assert goes_on.wait(30)
        raise OSError(28, "No space left on device")

    def flushed(fd):
        flushes.append(fd)
        goes_on.set()
        storing.join(30)
        flush(fd)

    def store():
        with pytest.raises(NoSpace):
            journal.store(memoryview(bytes(2000)))

    monkeypatch.setattr(os, "pwrite", full)
    storing = threading.Thread(target=store)
    storing.start()
    assert writing.wait(30)
    monkeypatch.setattr(os, "fdatasync", flushed)
    journal.sync(position)
    after = journal.append(b"[]")
    journal.sync(after)
    assert len(flushes) == 2, "the second record was never flushed"


def test_only_its_owner_can_read_a_journal_and_its_snapshots(tmp_path):
    before = os.umask(0)
    try:
        with folder.locked(tmp_path / "hub"):
            book = Book(tmp_path / "hub").join("a")
            book.ledger.snapshot()
    finally:
        os.umask(before)
    assert (tmp_path / "hub").stat().st_mode & 0o777 == 0o700
    paths = [*(tmp_path / "hub").glob("journal-*"), *(tmp_path / "hub").glob("snapshot-*")]
    assert len(paths) >= 2
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_a_payload_that_a_new_segment_has_overtaken_is_stored_again(tmp_path):
    book = Book(tmp_path).join("a")
    data = codec("int8").encode(np.ones(NUMELS[0], np.float32))
    payload = book.ledger.store_payload("int8", NUMELS[0], zlib.crc32(data), data)
    assert book.ledger.is_current(payload)
    book.ledger.snapshot()
    assert not book.ledger.is_current(payload)
