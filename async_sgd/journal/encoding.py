"""Encode the hub's records as JSON, and decode them. Payloads are referred to by their place in the file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.hub import layout_from_rows, layout_rows
from aedit.async_sgd.journal.frames import Damaged, File
from aedit.async_sgd.rules import MergePart, Push, Record, Values, Vector, records
from aedit.proto.codecs import codec

_KINDS = {kind.__name__: kind for kind in get_args(Record)}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_PUSH = ("node", "unit", "seq", "base", "steps", "tokens")


@dataclass(frozen=True, slots=True)
class Payload:
    """`Values` of a push that stay encoded in the journal's file, and take no memory until they are read."""

    codec: str
    numel: int
    crc: int
    file: File
    offset: int
    length: int

    def view(self) -> memoryview:
        """Return the encoded bytes without a copy in memory."""
        return self.file.view(self.offset, self.length)

    def read(self, start: int, stop: int) -> Vector:
        """Return elements start..stop as fp32."""
        return codec(self.codec).decode(self.view(), self.numel, start, stop)

    def check(self) -> None:
        """Raise Damaged unless the file still has what was acknowledged."""
        if crc32(self.view()) != self.crc:
            raise Damaged(f"{self.file.path}, byte {self.offset}: an accepted push is damaged")


def encode_records(batch: Sequence[Record]) -> bytes:
    """Return a batch as JSON: records that were decided together, and are applied together or not at all."""
    return _ENCODER.encode([_out(record) for record in batch]).encode()


def decode_records(data: bytes, file: File) -> list[Record]:
    """Return the batch that `encode_records` was given. file: that has it, and its payloads."""
    return [_in(plain, file) for plain in json.loads(data.decode())]


def push_out(push: Push) -> dict[str, Any]:
    """Return a push without its values, as JSON can hold it. NaN and infinities are kept."""
    return {name: getattr(push, name) for name in _PUSH} | {
        "norms": list(push.norms),
        "values": _place(push.values),
    }


def push_in(plain: dict[str, Any], values: Values) -> Push:
    """Return the push that `push_out` was given, with its values."""
    numbers = {name: plain[name] for name in _PUSH}
    return Push(**numbers, norms=tuple(plain["norms"]), values=values)


def _place(values: Values) -> dict[str, Any]:
    """Return where a payload is in its file, and its size, codec and checksum."""
    assert isinstance(values, Payload), "only what is in the journal's file can be referred to"
    return {
        "codec": values.codec,
        "numel": values.numel,
        "crc": values.crc,
        "at": values.offset,
        "length": values.length,
    }


def _out(record: Record) -> dict[str, Any]:
    kind = type(record).__name__
    match record:
        case records.Founded(layout, facts, num_samples):
            rows = layout_rows(layout)
            return {"kind": kind, "layout": rows, "facts": [list(f) for f in facts], "samples": num_samples}
        case records.Accepted(push):
            return {"kind": kind} | push_out(push)
        case records.Merged(unit, version, parts, at_s, share):
            rows = [[p.node, p.seq, p.weight, p.scale, p.staleness] for p in parts]
            plain = {"kind": kind, "unit": unit, "version": version, "parts": rows, "at_s": at_s}
            return plain | ({} if share is None else {"share": share})
        case records.Mixed(unit, version, values, mix):
            return {"kind": kind, "unit": unit, "version": version, "mix": mix, "values": _place(values)}
        case _:
            return {"kind": kind} | {f.name: getattr(record, f.name) for f in fields(record)}


def _in(plain: dict[str, Any], file: File) -> Record:
    kind = plain.pop("kind")
    match kind:
        case "Founded":
            facts = tuple((name, value) for name, value in plain["facts"])
            return records.Founded(layout_from_rows(plain["layout"]), facts, plain["samples"])
        case "Accepted":
            return records.Accepted(push_in(plain, _payload(plain["values"], file)))
        case "Merged":
            parts = tuple(MergePart(*row) for row in plain["parts"])
            return records.Merged(plain["unit"], plain["version"], parts, plain["at_s"], plain.get("share"))
        case "Mixed":
            values = _payload(plain["values"], file)
            return records.Mixed(plain["unit"], plain["version"], values, plain["mix"])
        case "Configured":
            return records.configured(plain)
        case _:
            record: Record = _KINDS[kind](**plain)
            return record


def _payload(place: dict[str, Any], file: File) -> Payload:
    return Payload(place["codec"], place["numel"], place["crc"], file, place["at"], place["length"])
