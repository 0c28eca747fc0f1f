"""The anchors of a part by unit and version: as a journal has them, and as nodes have received them."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aedit.async_sgd.rules import Merged
from aedit.launch.hub import anchors_of, hub_of, records_of
from aedit.types import UserError
from benchmarks.chaos_parts.history import Segment, chain_of

Answers = dict[tuple[int, int], str]
"""SHA-256 of the anchor by unit and version."""


def journaled(folder: Path, copies: Sequence[Segment], into: Path) -> Answers:
    """Return all answers of the history that ends in `folder`, by replaying it from its beginning.

    into: a new folder, for links to its segments.
    """
    into.mkdir()
    for segment in chain_of(folder, copies):
        os.link(segment.path, into / f"journal-{segment.number:08}")
    for name in ("run.toml", "part.json"):
        shutil.copyfile(folder / name, into / name)
    hub, found = hub_of(into), Answers()
    for record in records_of(into):
        hub.apply(record)
        if isinstance(record, Merged):
            version, values = hub.anchor(record.unit)
            found[record.unit, version] = hashlib.sha256(values.tobytes()).hexdigest()
    return found


def received(ledgers: Iterable[Iterable[Mapping[str, Any]]], units: range) -> dict[tuple[int, int], set[str]]:
    """Return the digests of all anchors of these units that nodes have received, by unit and version."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in (line for lines in ledgers for line in lines if line["event"] == "received"):
        if line["unit"] in units:
            found.setdefault((line["unit"], line["version"]), set()).add(line["sha256"])
    return found


def conflicts(seen: Mapping[tuple[int, int], set[str]], told: Answers) -> int:
    """Return how many versions that nodes have received `told` lacks, or has with other values."""
    return sum(digests != {told.get(key)} for key, digests in seen.items())


def abandoned(copies: Iterable[Segment], chain: Iterable[Segment]) -> int:
    """Return the number of merges in copies of journals that the history lacks: nobody was shown them."""
    kept = {_merge(record) for segment in chain for record in segment.records if record["kind"] == "Merged"}
    found = {_merge(record) for segment in copies for record in segment.records if record["kind"] == "Merged"}
    return len(found - kept)


def _merge(record: Mapping[str, Any]) -> tuple[object, ...]:
    pushes = tuple((node, seq) for node, seq, *_ in record["parts"])
    return record["unit"], record["version"], record["at_s"], pushes


def digest_on_disk(folder: Path) -> str:
    """Return the SHA-256 over all newest anchors in a hub's folder; "" while they cannot be read."""
    digest = hashlib.sha256()
    with suppress(OSError, UserError):
        for unit, values in sorted(anchors_of(folder).items()):
            digest.update(unit.to_bytes(4, "big") + values.tobytes())
        return digest.hexdigest()
    return ""
