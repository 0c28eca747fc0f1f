"""Snapshots: the whole state of a hub in one file, so that the journal before it may be deleted."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.hub import Saved, SavedUnit
from aedit.async_sgd.journal.encoding import Payload, push_in, push_out
from aedit.async_sgd.journal.frames import (
    ARRAY,
    END,
    FILE_BYTES,
    HEAD,
    PAYLOAD,
    UNIT,
    Damaged,
    File,
    Frame,
    Head,
    Stretch,
    frame_at,
    frame_header,
    new_head,
    read_head,
)
from aedit.async_sgd.rules import Push, Values, Vector
from aedit.system import sync_directory

_LONG = 64
"""Items of a list that are encoded one by one."""


def write_snapshot(path: Path, saved: Saved, after: Head, *, fsync: bool = True) -> int:
    """Write a snapshot to `path`, whole or not at all, and return its bytes.

    after: head of the segment that follows it; it says of which journal the snapshot is, and of what in it.
    Array by array, without a copy in memory. Raises OSError, for example if the disk is full.
    """
    beside = path.with_name(path.name + ".new")
    try:
        out = _Writer(File(beside, create=True), after)
        out.frame(HEAD, snapshot_json(saved.numbers).encode())
        for unit in saved.units:
            _write_unit(out, unit)
            del unit  # what has been written need not be kept alive
        out.frame(END, b"")
        if fsync:
            os.fsync(out.file.fd)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return out.offset


def read_snapshot(path: Path) -> Saved:
    """Return the state in a snapshot. Its units are read one by one; each may raise Damaged, as this does."""
    file = File(path)
    read_head(file)
    whole = _Reader(file)
    numbers = json.loads(whole.next(HEAD).read())
    return Saved(numbers, _units(whole))


class _Writer:
    def __init__(self, file: File, after: Head) -> None:
        self.file = file
        head = new_head(after.seed, after.before_bytes, after.chain)
        self._mark = head.mark
        file.write(0, head.pack())
        self.offset = FILE_BYTES

    def frame(self, kind: int, body: bytes | memoryview) -> None:
        crc = 0 if kind == PAYLOAD else crc32(body)
        header = frame_header(self._mark, kind, len(body), crc, 0)
        self.file.write(self.offset, header)
        self.file.write(self.offset + len(header), body)
        self.offset += len(header) + len(body)


class _Reader:
    def __init__(self, file: File) -> None:
        self._file = file
        self._mark = read_head(file).mark
        self._offset = FILE_BYTES

    def next(self, *kinds: int) -> Frame:
        frame = frame_at(self._file, self._mark, self._offset)
        if frame.kind not in kinds:
            raise Damaged(f"{self._file.path}: a frame of kind {frame.kind} where {kinds} belongs")
        self._offset = frame.end
        return frame


def _write_unit(out: _Writer, unit: SavedUnit) -> None:
    pending = [push_out(push) for push in unit.pending]
    fields = {
        "index": unit.index,
        "numbers": unit.numbers,
        "arrays": list(unit.arrays),
        "pending": pending,
    }
    out.frame(UNIT, snapshot_json(fields).encode())
    for array in unit.arrays.values():
        out.frame(ARRAY, array.data.cast("B") if array.size else b"")
    for push in unit.pending:
        assert isinstance(push.values, Payload)
        out.frame(PAYLOAD, push.values.stretch.view())


def snapshot_json(values: Any) -> str:
    """Return values as JSON. Other threads run between the items of long lists, such as that of members."""
    if isinstance(values, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {snapshot_json(value)}" for name, value in values.items())
            + "}"
        )
    if isinstance(values, list) and len(values) > _LONG:
        return "[" + ", ".join(map(json.dumps, values)) + "]"
    return json.dumps(values)


def _units(whole: _Reader) -> Iterator[SavedUnit]:
    while (frame := whole.next(UNIT, END)).kind == UNIT:
        fields = json.loads(frame.read())
        arrays = {name: _array(whole.next(ARRAY)) for name in fields["arrays"]}
        pending = tuple(_push(plain, whole.next(PAYLOAD).body) for plain in fields["pending"])
        yield SavedUnit(fields["index"], fields["numbers"], arrays, pending)


def _array(frame: Frame) -> Vector:
    array = np.empty(frame.body.length // 4, np.float32)
    view = array.data.cast("B") if array.size else memoryview(b"")
    frame.body.file.read_into(frame.body.offset, view)
    if crc32(view) != frame.crc:
        raise Damaged(f"{frame.body.file.path}: damaged at byte {frame.body.offset}")
    return array


def _push(plain: dict[str, Any], stretch: Stretch) -> Push:
    def locate(where: dict[str, Any]) -> Values:
        payload = Payload(where["codec"], where["numel"], where["crc"], stretch)
        payload.check()
        return payload

    return push_in(plain, locate)
