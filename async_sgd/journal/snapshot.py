"""Snapshots: the whole state of a hub in one file, so that the journal before it may be deleted."""

import json
import os
from collections.abc import Callable, Iterator
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
    FileHead,
    Frame,
    frame_header,
    frames,
    new_head,
)
from aedit.async_sgd.rules import Push, Vector
from aedit.system import sync_directory

_LONG = 64
"""Items of a list that are encoded one by one."""


def write_snapshot(path: Path, saved: Saved, after: FileHead, *, fsync: bool = True) -> int:
    """Write a snapshot to `path`, whole or not at all, and return its bytes.

    after: head of the segment that follows it; it says of which journal the snapshot is, and of what in it.
    Array by array, without a copy in memory. Raises OSError, for example if the disk is full.
    """
    beside = path.with_name(path.name + ".new")
    head, offset = new_head(after.seed, after.before_bytes, after.chain), FILE_BYTES
    try:
        file = File(beside, create=True)
        file.write(0, head.pack())

        def add(kind: int, body: bytes | memoryview) -> None:
            nonlocal offset
            crc = 0 if kind == PAYLOAD else crc32(body)
            header = frame_header(head.mark, kind, len(body), crc, 0)
            file.write(offset, header)
            file.write(offset + len(header), body)
            offset += len(header) + len(body)

        numbers, units = saved
        add(HEAD, snapshot_json(numbers).encode())
        for unit in units:
            _write_unit(add, unit)
            del unit  # what has been written need not be kept alive
        add(END, b"")
        if fsync:
            os.fsync(file.fd)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return offset


def _write_unit(add: Callable[[int, bytes | memoryview], None], unit: SavedUnit) -> None:
    pending = [push_out(push) for push in unit.pending]
    fields = {"index": unit.index, "numbers": unit.numbers, "arrays": list(unit.arrays)}
    add(UNIT, snapshot_json(fields | {"pending": pending}).encode())
    for array in unit.arrays.values():
        add(ARRAY, array.data.cast("B") if array.size else b"")
    for push in unit.pending:
        assert isinstance(push.values, Payload)
        add(PAYLOAD, push.values.view())


def read_snapshot(path: Path) -> Saved:
    """Return the state in a snapshot. Its units are read one by one; each may raise Damaged, as this does."""
    rest = frames(File(path))
    _, head = _next(path, rest, HEAD)
    return json.loads(head), _units(path, rest)


def snapshot_json(values: Any) -> str:
    """Return values as JSON. Other threads run between the items of long lists, such as the members."""
    if isinstance(values, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {snapshot_json(value)}" for name, value in values.items())
            + "}"
        )
    if isinstance(values, list) and len(values) > _LONG:
        return "[" + ", ".join(map(json.dumps, values)) + "]"
    return json.dumps(values)


def _units(path: Path, rest: Iterator[tuple[Frame, bytes]]) -> Iterator[SavedUnit]:
    while (found := _next(path, rest, UNIT, END))[0].kind == UNIT:
        fields = json.loads(found[1])
        arrays = {name: _array(_next(path, rest, ARRAY)[0]) for name in fields["arrays"]}
        pending = tuple(_push(plain, _next(path, rest, PAYLOAD)[0]) for plain in fields["pending"])
        yield SavedUnit(fields["index"], fields["numbers"], arrays, pending)


def _next(path: Path, rest: Iterator[tuple[Frame, bytes]], *kinds: int) -> tuple[Frame, bytes]:
    """Return the next frame and its body. Raises Damaged unless it is of one of these kinds."""
    frame, body = next(rest, (None, b""))
    if frame is None:
        raise Damaged(f"{path} ends early")
    if frame.kind not in kinds:
        raise Damaged(f"{path}: a frame of kind {frame.kind} where {kinds} belongs")
    return frame, body


def _array(frame: Frame) -> Vector:
    array = np.empty(frame.length // 4, np.float32)
    view = array.data.cast("B") if array.size else memoryview(b"")
    frame.file.read_into(frame.offset, view)
    if crc32(view) != frame.crc:
        raise Damaged(f"{frame.file.path}: damaged at byte {frame.offset}")
    return array


def _push(plain: dict[str, Any], frame: Frame) -> Push:
    place = plain["values"]
    payload = Payload(place["codec"], place["numel"], place["crc"], frame.file, frame.offset, frame.length)
    payload.check()
    return push_in(plain, payload)
