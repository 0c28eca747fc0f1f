"""The folder of a hub: its files, recovery from them, and the deletion of old ones.

    run.toml             the run's configuration, and `part.json`: which share of the units
    snapshot-N           everything decided before segment N
    journal-N, N+1 ...   everything decided since
    journal.json         which journal it is, and the number of its newest segment

Two snapshots are kept, and the segments from the older one on. So a damaged newest one does no harm, and the
journal of a run that is shorter than `hub.snapshot_bytes` is there from its beginning.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from aedit.async_sgd.hub import Hub, HubState, Saved, load_state
from aedit.async_sgd.journal.encoding import Payload, decode_records
from aedit.async_sgd.journal.frames import (
    FILE_BYTES,
    RECORDS,
    Chain,
    Damaged,
    File,
    FileHead,
    chain_of,
    frames,
    is_vouched_for,
    read_head,
)
from aedit.async_sgd.journal.journal import NOTE, Journal, Position, segment_path
from aedit.async_sgd.journal.snapshot import read_snapshot, write_snapshot
from aedit.async_sgd.rules import Accepted, Led, Mixed, Record
from aedit.system import sync_directory
from aedit.types import UserError

log = logging.getLogger(__name__)


class Store:
    """The folder of one hub; no other process writes to it."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self.directory, self._fsync = directory, fsync
        self.lost_end: Position | None = None
        """End of a copy of a journal before `recover` cut off what its leader had on disk."""

    def recover(self, hub: Hub, *, accept_loss: bool = False, is_copy: bool = False) -> Journal:
        """Bring a new hub to the state of the folder's last one, and return the journal to continue.

        An incomplete end is cut off. Raises UserError if something that was acknowledged is damaged or gone.

        accept_loss: go on without segments that are missing at the end, under a new epoch.
        is_copy: of the journal of another hub. Its frames say what was on the disk there; here, a machine
            that failed may have written the last ones without those before. They are cut off, too.
        """
        for left in self.directory.glob("*.new"):
            left.unlink()
        if accept_loss:
            (self.directory / NOTE).unlink(missing_ok=True)
        journal = self.open(*self.read(hub, mend=True, is_copy=is_copy))
        if accept_loss:
            journal.rotate(new_epoch=True)
        return journal

    def open(self, number: int, chain: Chain | None = None) -> Journal:
        """Return the journal to continue in segment `number`, the newest one.

        It is begun if it is not there: as the snapshot before it says, or as the first of a new journal.

        chain: of the segment, if it is known.
        """
        path = snapshot_path(self.directory, number)
        is_begun = segment_path(self.directory, number).exists()
        after = read_head(File(path)) if path.exists() and not is_begun else None
        return Journal(self.directory, number, fsync=self._fsync, after=after, chain=chain)

    def read(self, hub: Hub, *, mend: bool = False, is_copy: bool = False) -> tuple[int, Chain | None]:
        """Bring a new hub to the state of the last one; return number and chain of the newest segment.

        Changes no file unless `mend` is true.
        """
        noted = check_noted(self.directory)
        first = self._load_newest(hub)
        segments = [number for number in segment_numbers(self.directory, "journal") if number >= first]
        check_gapless(self.directory, first, segments)
        newest, chain = first, None
        for number in segments:
            may_end_early = number == segments[-1]
            has_head = number <= noted
            found = self._replay(hub, number, may_end_early, has_head=has_head, mend=mend, is_copy=is_copy)
            if found is not None:
                newest, chain = number, found
        return newest, chain

    def save(self, state: Saved, number: int) -> int:
        """Write the snapshot before segment `number`, delete what it makes unnecessary, and return its bytes.

        Raises OSError, and everything is as before.
        """
        after = read_head(File(segment_path(self.directory, number)))
        num_bytes = write_snapshot(snapshot_path(self.directory, number), state, after, fsync=self._fsync)
        snapshots = segment_numbers(self.directory, "snapshot")
        oldest = snapshots[-2] if len(snapshots) > 1 else 0
        for kind, path in (("snapshot", snapshot_path), ("journal", segment_path)):
            for each in segment_numbers(self.directory, kind):
                if each < oldest:
                    path(self.directory, each).unlink()
        return num_bytes

    def saved_bytes(self) -> int:
        """Return the size of the newest snapshot; 0 if there is none."""
        newest = segment_numbers(self.directory, "snapshot")[-1:]
        return sum(snapshot_path(self.directory, number).stat().st_size for number in newest)

    def _load_newest(self, hub: Hub) -> int:
        """Load the newest snapshot that is whole; return the number of the first segment to replay."""
        snapshots = segment_numbers(self.directory, "snapshot")
        for number in reversed(snapshots):
            try:
                load_state(read_snapshot(snapshot_path(self.directory, number)), hub.state)
                return number
            except Damaged as error:
                log.error("%s: going back to the snapshot before it", error)
                hub.state = HubState(hub.state.part, hub.state.has_parent)
        if snapshots and 1 not in segment_numbers(self.directory, "journal"):
            raise UserError(f"{self.directory}: no snapshot is whole; restore the folder from a copy")
        return 1

    def _replay(
        self, hub: Hub, number: int, may_end_early: bool, *, has_head: bool, mend: bool, is_copy: bool
    ) -> Chain | None:
        """Apply a segment, and return its chain; None if not even its head was written."""
        file, chain = File(segment_path(self.directory, number)), None
        good = 0
        try:
            chain = Chain(read_head(file))
            good = FILE_BYTES
            for frame, body in frames(file):
                if frame.kind == RECORDS:
                    batch = decode_records(body, file)
                    check_payloads(batch)
                    for record in batch:
                        hub.apply(record)
                    chain.add(frame.header + body, frame.end)
                good = frame.end
        except Damaged as error:
            was_whole = is_vouched_for(file, good) if good else has_head or file.num_bytes > FILE_BYTES
            if may_end_early and was_whole and is_copy:
                self.lost_end = number, file.num_bytes
            elif was_whole or not may_end_early:
                raise UserError(
                    f"{error}, and it was whole before: restore its folder from a copy"
                ) from error
            log.warning("%s: nothing from byte %d on counts, as nothing was acknowledged", error, good)
            if not mend:
                return chain
            if good:
                os.ftruncate(file.fd, good)
                os.fsync(file.fd)
            else:  # not even its head was written
                file.path.unlink()
            sync_directory(self.directory)
        return chain


def batches(file: File, offset: int = FILE_BYTES) -> Iterator[tuple[list[Record], int]]:
    """Yield what was decided together (nothing, for a payload), and where it ends. Raises Damaged."""
    for frame, body in frames(file, offset):
        yield decode_records(body, file) if frame.kind == RECORDS else [], frame.end


def records_after(directory: Path, position: Position) -> Iterator[Record]:
    """Yield the records behind a position. Raises Damaged."""
    for number in segment_numbers(directory, "journal"):
        for batch, end in batches(File(segment_path(directory, number))) if number >= position[0] else ():
            yield from batch if (number, end) > position else ()


def begin_after(directory: Path, term: int) -> tuple[tuple[int, int], bool]:
    """Return the segment and the byte at which the first term above `term` begins; (0, 0) without one.

    Returns also whether `term` is missing: there is a lower one right before that place. One that may be in a
    segment that was deleted is not missing.
    """
    before = term
    for number in segment_numbers(directory, "journal"):
        start = FILE_BYTES
        try:
            for batch, end in batches(File(segment_path(directory, number))):
                for led in (record.term for record in batch if isinstance(record, Led)):
                    if led > term:
                        return (number, start), before < term
                    before = led
                start = end
        except (Damaged, FileNotFoundError):
            continue  # the end of the newest one is being written, or the oldest one is not needed any more
    return (0, 0), False


def check_gapless(directory: Path, first: int, segments: list[int]) -> None:
    """Raise UserError if a segment is missing, or is not the one that its successor says.

    The snapshot before the first segment is compared with that, too.
    """
    if segments and segments != list(range(first, first + len(segments))):
        raise UserError(f"{directory}: journal segments {segments} are not all from {first} on; restore them")
    for number in segments:
        file = File(segment_path(directory, number))
        try:
            head = read_head(file)
            if number == first:
                before = snapshot_path(directory, number)
                saved = read_head(File(before)) if before.exists() else head
                is_next = (saved.seed, saved.chain) == (head.seed, head.chain)
            else:
                before = segment_path(directory, number - 1)
                is_next = is_before(File(before), head)
        except Damaged:
            continue  # reported when the segment is read
        if not is_next:
            raise UserError(
                f"{before} is not what {file.path} was written after: one of them was cut off or replaced;"
                " restore the folder from a copy"
            )


def is_before(segment: File, head: FileHead) -> bool:
    """Return whether a segment with this head was begun at the end of `segment`."""
    is_whole = segment.num_bytes == head.before_bytes
    return is_whole and head.chain == chain_of(segment).digest


def check_noted(directory: Path) -> int:
    """Return the number of the newest segment that is known to have been begun; 0 if none is.

    Raises UserError if it is gone, or of another journal.
    """
    note, segments = directory / NOTE, segment_numbers(directory, "journal")
    if not note.exists():
        return 0
    try:
        noted = json.loads(note.read_text())
        number, epoch = int(noted["segment"]), str(noted["epoch"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{note} is damaged: restore the folder from a copy") from error
    if not segments or segments[-1] < number:
        raise UserError(
            f"{segment_path(directory, number)} is missing: this folder had the journal {epoch} up to there."
            " Copy the journal back, or promote the standby; `aedit hub --force-lead` goes on with what is"
            " left, and nodes must be started again"
        )
    path = segment_path(directory, number)
    try:
        found = read_head(File(path)).epoch if path.exists() else epoch
    except Damaged:
        return number  # reported when the segment is read
    if found != epoch:
        raise UserError(
            f"{path} is of the journal {found}, and {note} says {epoch}: files of two runs were mixed;"
            " restore the folder from a copy"
        )
    return number


def check_payloads(batch: list[Record], before: int | None = None) -> None:
    """Raise Damaged if values that a record of the batch refers to are not what they were.

    before: Only those that begin before this byte.
    """
    for record in batch:
        values = record.push.values if isinstance(record, Accepted) else None
        values = record.values if isinstance(record, Mixed) else values
        if isinstance(values, Payload) and (before is None or values.offset < before):
            values.check()


_ASIDE = "set_aside"
"""Folder in that of a hub: what a follower had and its leader did not, in a numbered folder each."""


def moved_aside(directory: Path) -> list[dict[str, object]]:
    """Return the path and the bytes of everything that was set aside, see `move_aside`."""
    found = (path for path in (directory / _ASIDE).glob("*") if path.name.isdecimal())
    folders = sorted(found, key=lambda path: int(path.name))
    return [
        {"path": str(path), "bytes": sum(file.stat().st_size for file in path.iterdir())} for path in folders
    ]


def move_aside(directory: Path, after: int, offset: int = 0) -> Path | None:
    """Move the snapshots and segments behind segment `after` into a new folder; return that.

    None if there is nothing. After a crash in between the rest is a journal still. Raises OSError.

    offset: with it a copy of what segment `after` has from this byte on is there too.
    """
    paths = _files_after(directory, after)
    segment = segment_path(directory, after)
    has_tail = offset > 0 and segment.stat().st_size > offset
    if not paths and not has_tail:
        return None
    before = (path.name for path in (directory / _ASIDE).glob("*"))
    number = 1 + max((int(name) for name in before if name.isdecimal()), default=0)
    place = directory / _ASIDE / str(number)
    place.mkdir(mode=0o700, parents=True)
    try:
        if has_tail:
            with segment.open("rb") as source, (place / f"{segment.name}.from-{offset}").open("wb") as copy:
                source.seek(offset)
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    for path in (directory / NOTE, *paths):
        if path.exists():
            path.rename(place / path.name)
    for changed in (place, place.parent, directory):
        sync_directory(changed)
    return place


def delete_after(directory: Path, after: int) -> None:
    """Delete the snapshots and segments behind segment `after`."""
    for path in (directory / NOTE, *_files_after(directory, after)):
        path.unlink(missing_ok=True)


def _files_after(directory: Path, after: int) -> list[Path]:
    """Return snapshots and segments, the newest first: without the first ones the rest is a journal still."""
    return [
        path(directory, number)
        for kind, path in (("journal", segment_path), ("snapshot", snapshot_path))
        for number in reversed(segment_numbers(directory, kind))
        if number > after
    ]


def segment_numbers(directory: Path, kind: str) -> list[int]:
    """Return the numbers of all snapshots or segments, ascending."""
    found = (path.name.rpartition("-")[2] for path in directory.glob(f"{kind}-*"))
    return sorted(int(number) for number in found if number.isdecimal())


def snapshot_path(directory: Path, number: int) -> Path:
    """Return the path of the snapshot before segment `number`."""
    return directory / f"snapshot-{number:08d}"
