"""Encode the hub's records as JSON, and decode them. Payloads are referred to by their place in the file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.journal.frames import Damaged, Stretch
from aedit.async_sgd.rules import Part, Push, Record, Values, Vector, records
from aedit.proto.codecs import codec
from aedit.types import Layout, TensorLayout, UnitLayout

Locate = Callable[[dict[str, Any]], Values]
"""Finds the payload that `place` has described."""

_PLAIN = {
    kind.__name__: kind
    for kind in (
        records.Joined,
        records.Left,
        records.Refused,
        records.Garbled,
        records.SentUp,
        records.RoundOpened,
        records.Leased,
        records.Used,
        records.Led,
        records.Agreed,
        records.Ticked,
        records.Banned,
    )
}
_PUSH = ("node", "unit", "seq", "base", "steps", "tokens")


def encode_records(batch: Sequence[Record]) -> bytes:
    """Return a batch as JSON: records that were decided together, and are applied together or not at all."""
    return json.dumps([_out(record) for record in batch], separators=(",", ":")).encode()


def decode_records(data: bytes, locate: Locate) -> list[Record]:
    """Return the batch that `encode` was given. locate: finds a payload by its place."""
    return [_in(fields, locate) for fields in json.loads(data)]


def push_out(push: Push) -> dict[str, Any]:
    """Return a push without its values, as JSON can hold it. NaN and infinities are kept."""
    return {name: getattr(push, name) for name in _PUSH} | {
        "norms": list(push.norms),
        "values": place(push.values),
    }


def push_in(plain: dict[str, Any], locate: Locate) -> Push:
    """Return the push that `push_out` was given."""
    numbers = {name: plain[name] for name in _PUSH}
    return Push(**numbers, norms=tuple(plain["norms"]), values=locate(plain["values"]))


def place(values: Values) -> dict[str, Any]:
    """Return where a payload is in its file, and its size, codec and checksum."""
    assert isinstance(values, Payload), "only what is in the journal's file can be referred to"
    stretch = values.stretch
    return {
        "codec": values.codec,
        "numel": values.numel,
        "crc": values.crc,
        "at": stretch.offset,
        "length": stretch.length,
    }


def _out(record: Record) -> dict[str, Any]:
    kind = type(record).__name__
    match record:
        case records.Founded(layout, facts, num_samples):
            units = [[u.name, [[t.name, list(t.shape)] for t in u.tensors]] for u in layout.units]
            return {"kind": kind, "layout": units, "facts": [list(f) for f in facts], "samples": num_samples}
        case records.Accepted(push):
            return {"kind": kind} | push_out(push)
        case records.Merged(unit, version, parts, at_s, share):
            rows = [[p.node, p.seq, p.weight, p.scale, p.staleness] for p in parts]
            plain = {"kind": kind, "unit": unit, "version": version, "parts": rows, "at_s": at_s}
            return plain | ({} if share is None else {"share": share})
        case records.Mixed(unit, version, values, mix):
            return {"kind": kind, "unit": unit, "version": version, "mix": mix, "values": place(values)}
        case _:
            return {"kind": kind} | {f.name: getattr(record, f.name) for f in fields(record)}


def _in(plain: dict[str, Any], locate: Locate) -> Record:
    kind = plain.pop("kind")
    match kind:
        case "Founded":
            facts = tuple((name, value) for name, value in plain["facts"])
            return records.Founded(_layout(plain["layout"]), facts, plain["samples"])
        case "Accepted":
            return records.Accepted(push_in(plain, locate))
        case "Merged":
            parts = tuple(Part(*row) for row in plain["parts"])
            return records.Merged(plain["unit"], plain["version"], parts, plain["at_s"], plain.get("share"))
        case "Mixed":
            return records.Mixed(plain["unit"], plain["version"], locate(plain["values"]), plain["mix"])
        case "Configured":
            return records.configured(plain)
        case _:
            record: Record = _PLAIN[kind](**plain)
            return record


def _layout(units: list[Any]) -> Layout:
    return Layout(
        tuple(
            UnitLayout(name, tuple(TensorLayout(tensor, tuple(shape)) for tensor, shape in tensors))
            for name, tensors in units
        )
    )


@dataclass(frozen=True, slots=True)
class Payload:
    """`Values` that are read from a file when they are needed, and take no memory until then."""

    codec: str
    numel: int
    crc: int
    stretch: Stretch

    def read(self, start: int, stop: int) -> Vector:
        """Return elements start..stop as fp32."""
        return codec(self.codec).decode(self.stretch.view(), self.numel, start, stop)

    def check(self) -> None:
        """Raise Damaged unless the file still has what was acknowledged."""
        if crc32(self.stretch.view()) != self.crc:
            where = f"{self.stretch.file.path}, byte {self.stretch.offset}"
            raise Damaged(f"{where}: an accepted push is damaged")
