"""Read the journals of several hubs without the code of the hub, and join them into one history.

Every segment of a journal holds the hash of the segment before it. So the history of the hub that leads at
the end is found in whatever copies of its segments are left: its own, and those of other hubs.
"""

import hashlib
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = struct.Struct("<8s4sQ16s32sI")
"""Format, mark, bytes of the segment before, seed, chain of the segment before, CRC-32."""
FRAME = struct.Struct("<4sB3xIQQI")
"""Mark, kind, CRC-32 of the body, its bytes, what was synced then, CRC-32 of the header."""
RECORDS = 1

Key = tuple[int, int, int]
"""Node, unit and number of a push."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One copy of a segment, as far as it is whole."""

    path: Path
    number: int
    before: tuple[int, bytes]
    """Bytes and chain of the segment before it; (0, zeros) for the first one."""
    end: tuple[int, bytes]
    """Bytes and chain of this one."""
    records: list[dict[str, Any]]
    damaged_payloads: int


@dataclass(slots=True)
class History:
    """Decisions of the hubs, in the order of the journal."""

    missing: int = 0
    """Segments at the beginning of which no copy is left."""
    accepted: dict[Key, int] = field(default_factory=dict)
    """CRC-32 of the payload, by push."""
    steps: int = 0
    """Inner steps of all accepted pushes, as the hub counts them."""
    merged: Counter[Key] = field(default_factory=Counter)
    shares: dict[Key, float] = field(default_factory=dict)
    """Share of a round that the push counted as."""
    repeated: int = 0
    """Pushes that were accepted a second time."""
    damaged: int = 0
    """Payloads of accepted pushes that are not what was acknowledged."""
    terms: list[int] = field(default_factory=list)
    alone: int = 0
    """Pushes that were accepted while the leading hub was the only replica, after there had been others."""
    most: int = 0
    """Largest number of replicas of a configuration so far."""
    replicas: int = 0
    """Number of replicas of the newest configuration."""

    def take(self, segment: Segment) -> None:
        """Add the records of the next segment."""
        self.damaged += segment.damaged_payloads
        for record in segment.records:
            match record["kind"]:
                case "Accepted" if record["base"]:  # without a base they are the run's first parameters
                    key = record["node"], record["unit"], record["seq"]
                    self.repeated += key in self.accepted
                    self.accepted[key] = record["values"]["crc"]
                    self.steps += record["steps"]
                    self.alone += self.replicas == 1 < self.most
                case "Merged":
                    for node, seq, *_ in record["parts"] if record["version"] > 1 else ():
                        self.merged[node, record["unit"], seq] += 1
                        share = (record.get("share") or 1.0) / len(record["parts"])
                        self.shares[node, record["unit"], seq] = share
                case "Led":
                    self.terms.append(record["term"])
                case "Configured":
                    self.replicas = len(record["replicas"])
                    self.most = max(self.most, self.replicas)


def keep(folder: Path, copies: Path) -> None:
    """Link every segment in a hub's folder a second time: it stays when the hub deletes its own name."""
    copies.mkdir(exist_ok=True)
    for path in folder.glob("journal-*"):
        with suppress(FileNotFoundError, FileExistsError):
            os.link(path, copies / f"{path.name}.{path.stat().st_ino}")


def read(path: Path) -> Segment | None:
    """Return a segment up to its first frame that is not whole; None without a head."""
    data = path.read_bytes()
    head = data[: HEAD.size]
    if len(head) < HEAD.size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
        return None
    _, mark, before_bytes, _, chain, _ = HEAD.unpack(head)
    digest, at, records, damaged = hashlib.sha256(head), HEAD.size, list[dict[str, Any]](), 0
    while at + FRAME.size <= len(data):
        header = data[at : at + FRAME.size]
        found, kind, crc, length, _, own = FRAME.unpack(header)
        end = at + FRAME.size + length
        if found != mark or zlib.crc32(header[:-4]) != own or end > len(data):
            break
        if kind == RECORDS:
            body = data[at + FRAME.size : end]
            if zlib.crc32(body) != crc:
                break
            digest.update(header + body)
            records += (batch := json.loads(body))
            damaged += sum(not _is_whole(record, data) for record in batch if record["kind"] == "Accepted")
        at = end
    number = int(path.name.split("-")[1].split(".")[0])
    return Segment(path, number, (before_bytes, chain), (at, digest.digest()), records, damaged)


def _is_whole(record: dict[str, Any], data: bytes) -> bool:
    values: dict[str, int] = record["values"]
    payload = data[values["at"] : values["at"] + values["length"]]
    return (len(payload), zlib.crc32(payload)) == (values["length"], values["crc"])


def chain_of(folder: Path, copies: Sequence[Segment]) -> list[Segment]:
    """Return the segments that lead to the newest one in `folder`, and that one, as far as they are left."""
    newest = max(folder.glob("journal-*"), key=lambda path: path.name)
    segment, chain = read(newest), list[Segment]()
    while segment is not None:
        chain.append(segment)
        wanted, number = segment.before, segment.number - 1
        segment = next((one for one in copies if (one.number, one.end) == (number, wanted)), None)
    return chain[::-1]


def history_of(folder: Path, copies: Sequence[Segment]) -> History:
    """Return the history that ends with the newest segment in `folder`, from it and from `copies`."""
    chain = chain_of(folder, copies)
    found = History(missing=chain[0].number - 1 if chain else 0)
    for segment in chain:
        found.take(segment)
    return found


def leaders(segments: Iterable[Segment]) -> dict[int, set[int]]:
    """Return the identities of the hubs that have led each term, by all copies of all journals."""
    found: dict[int, set[int]] = {}
    for segment in segments:
        for record in segment.records:
            if record["kind"] == "Configured":
                found.setdefault(record["term"], set()).add(record["leader"])
    return found
