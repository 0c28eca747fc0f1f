"""Tests that a journal knows which one it is: what is missing, replaced or of another run is found."""

import os
import re
import shutil
import struct
import zlib

import pytest
from kit.leading_hub import leading_hub
from kit.waiting import until
from test_journal import Book, reopened, same

from aedit.async_sgd.journal import File, JournalBroken, frames, segment_numbers, segment_path, snapshot_path
from aedit.async_sgd.journal.frames import read_head
from aedit.async_sgd.journal.journal import NOTE
from aedit.launch.hub import folder, leading
from aedit.types import UserError


def segments(directory, count=3):
    """Return a hub whose folder has `count` segments from the first one on, and no snapshot."""
    book = Book(directory).join("a")
    for _ in range(count - 1):
        book.push(0, 0)
        book.ledger.journal.rotate()
        book.push(0, 1)
    return book


def two(tmp_path):
    """Return the folders of two runs that decided the same, with files of equal length."""
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
        segments(place)
    return places


def test_all_segments_have_one_epoch_and_two_journals_never_the_same(tmp_path):
    epochs = [
        {read_head(File(segment_path(place, n))).epoch for n in segment_numbers(place, "journal")}
        for place in two(tmp_path)
    ]
    assert [len(found) for found in epochs] == [1, 1]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("gone", [(1, 2, 3), (3,), (2, 3)])
def test_a_deleted_journal_or_newest_segment_does_not_begin_a_fresh_run(tmp_path, gone):
    segments(tmp_path)
    for number in gone:
        segment_path(tmp_path, number).unlink()
    with pytest.raises(UserError, match=r"journal-00000003 is missing.*Copy the journal back"):
        reopened(tmp_path)
    assert segment_numbers(tmp_path, "journal") == [n for n in (1, 2, 3) if n not in gone]


def test_a_deleted_journal_behind_a_snapshot_is_found(tmp_path):
    book = Book(tmp_path).join("a")
    book.ledger.snapshot()
    book.push(0, 0)
    segment_path(tmp_path, 2).unlink()
    with pytest.raises(UserError, match="journal-00000002 is missing"):
        reopened(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 24, frames.FILE_BYTES - 1])
def test_a_newest_segment_that_has_lost_its_head_is_refused(tmp_path, size):
    segments(tmp_path)
    os.truncate(segment_path(tmp_path, 3), size)
    with pytest.raises(UserError, match="restore"):
        reopened(tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_segment_of_another_run_of_the_same_length_is_refused(tmp_path, number):
    one, other = two(tmp_path)
    assert segment_path(one, number).stat().st_size == segment_path(other, number).stat().st_size
    shutil.copy(segment_path(other, number), segment_path(one, number))
    with pytest.raises(UserError, match="restore the folder from a copy"):
        reopened(one)


def test_an_earlier_segment_that_was_written_anew_with_valid_checksums_is_refused(tmp_path):
    """Only the chain shows it: the length and the seed are as before, and every CRC is right."""
    segments(tmp_path)
    path = segment_path(tmp_path, 1)
    file, data = File(path), bytearray(path.read_bytes())
    frame, body = next(pair for pair in frames.frames(file) if b'"facts":[["seed","0"]]' in pair[1])
    forged = body.replace(b'["seed","0"]', b'["seed","1"]')
    start = frame.offset - frames.FRAME_BYTES
    header = frames.frame_header(
        read_head(file).mark, frame.kind, len(forged), zlib.crc32(forged), frame.synced
    )
    data[start : frame.end] = header + forged
    path.write_bytes(data)
    with pytest.raises(UserError, match="cut off or replaced"):
        reopened(tmp_path)


def test_a_snapshot_of_another_run_is_refused(tmp_path):
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
        book = Book(place).join("a")
        book.ledger.snapshot()
        book.push(0, 0)
    shutil.copy(snapshot_path(places[1], 2), snapshot_path(places[0], 2))
    with pytest.raises(UserError, match="restore the folder from a copy"):
        reopened(places[0])


def test_files_of_two_runs_are_not_mixed(tmp_path):
    one, other = two(tmp_path)
    shutil.copy(other / NOTE, one / NOTE)
    with pytest.raises(UserError, match="files of two runs"):
        reopened(one)


def test_the_chain_goes_on_after_a_restart(tmp_path):
    segments(tmp_path)
    book = Book(tmp_path)
    book.push(0, 0)
    book.ledger.journal.rotate()
    book.push(0, 1)
    same(book.hub, reopened(tmp_path))


def test_a_journal_of_an_older_version_is_refused_with_the_remedy(tmp_path):
    first = struct.pack("<8s4sQ", b"aedit-1\n", b"mark", 0)
    segment_path(tmp_path, 1).write_bytes(first + struct.pack("<I", zlib.crc32(first)))
    with pytest.raises(UserError, match="another version of aedit: finish the run with that version, or"):
        reopened(tmp_path)


def unlink(path):
    path.unlink()


def replace_it(path):
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def move_the_folder(path):
    path.parent.rename(path.parent.with_name("moved"))


def remove_the_folder(path):
    shutil.rmtree(path.parent)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("harm", [unlink, replace_it, move_the_folder, remove_the_folder, cut])
@pytest.mark.parametrize("fsync", [True, False])
def test_a_journal_that_is_taken_away_from_a_running_hub_is_noticed_by_the_next_sync(tmp_path, harm, fsync):
    (place := tmp_path / "hub").mkdir()
    book = Book(place).join("a")
    book.ledger.journal._fsync = fsync
    position = book.ledger.journal.append(b"[]")
    harm(segment_path(place, 1))
    with pytest.raises(JournalBroken, match=r"journal-00000001 .* while the hub was running"):
        book.ledger.durable(position)
    with pytest.raises(JournalBroken):
        book.ledger.journal.append(b"[]")


def test_an_idle_hub_whose_folder_is_removed_ends_and_names_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(leading, "LINE_EVERY_S", 0.05)
    with leading_hub(tmp_path) as hub:
        hub.node().found()
        shutil.rmtree(tmp_path / "hub")
        until(lambda: hub.process.is_over, "the end of a hub without a journal")
    assert hub.process.exit_code() == 1
    said = capfd.readouterr().err
    assert re.search(r"the hub has failed: .*journal-00000001 was removed, or its folder was", said)
    assert "Traceback" not in said


def test_a_deleted_lock_file_admits_no_second_hub(tmp_path):
    with folder.locked(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(UserError, match="another hub is running"), folder.locked(tmp_path):
            pass
    with folder.locked(tmp_path):
        pass
