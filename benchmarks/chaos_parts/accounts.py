"""Compare what nodes saw acknowledged with the history of the hub that leads at the end."""

import hashlib
import json
import os
import shutil
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules import Accepted, Merged, Record
from aedit.launch.hub import anchors_of, hub_of, records_of
from aedit.types import UserError
from benchmarks.kit.cluster import Field, answered
from benchmarks.kit.paced_node import STRIDE, PacedNode

# -- Compare a hub's journal, its anchors and the ledgers of paced nodes.


LATE = "past its deadline"
"""Text of a client's log for a call that ended more than a second too late."""

Steps = Counter[tuple[int, int]]
"""Steps by node and unit."""

Shares = dict[tuple[int, int], float]
"""Steps by node and unit, each push times its share of a round."""


@dataclass(frozen=True, slots=True)
class Books:
    """Result of the comparison. Without an error all but `steps_per_s` are 0, and `replayed` is true."""

    steps_per_s: float
    """Steps in accepted pushes, mean over units, of all nodes together."""
    lost: int
    """Pushes that are in no merge or in two, and elements of anchors that are not the sum of the shares of
    the accepted pushes."""
    unknown: int
    """Steps in pushes that a node saw accepted and that the journal lacks."""
    twice: int
    """Steps in the journal above those that their nodes have sent."""
    owed: int
    """Steps that a node which has left in good order made, and did not see accepted; or the other way."""
    late_calls: int
    """Calls that ended more than a second after their deadline."""
    replayed: bool
    """The journal from its beginning gives the same bits as the snapshot."""


def compare(ground: Field, ended_s: float) -> Books:
    """Compare the accounts of a field that has ended.

    ended_s: when its nodes were asked to end, by the monotonic clock.
    """
    directory, whole = ground.directory / "hub", ground.directory / "whole"
    _keep(directory, whole)
    ledgers = [ground.lines(name) for name in ground.nodes]
    journal = Steps()
    records = list(records_of(whole))
    for record in records:
        if isinstance(record, Accepted):
            journal[record.push.node, record.push.unit] += record.push.steps
    shares, astray = by_share(records)
    anchors, again = anchors_of(directory), anchors_of(whole, from_the_beginning=True)
    seen, unanswered = _seen(ledgers), _unanswered(ledgers)
    return Books(
        steps_per_s=sum(journal.values()) / ground.plan.units / mean_s(ledgers, ended_s),
        lost=astray + sum(differ(anchors[i], sums) for i, sums in enumerate(expected(ground.plan, shares))),
        unknown=sum(max(0, seen[key] - journal[key]) for key in seen),
        twice=sum(max(0, steps - seen[key] - unanswered[key]) for key, steps in journal.items()),
        owed=sum(owed(attempt, ground.plan.units) for lines in ledgers for attempt in attempts(lines)),
        late_calls=(ground.directory / "output.log").read_text(errors="replace").count(LATE),
        replayed=all(anchors[i].tobytes() == again[i].tobytes() for i in range(ground.plan.units)),
    )


@contextmanager
def journal_kept(ground: Field) -> Iterator[None]:
    """Keep in another folder, for `compare`, the segments that the hub's snapshots let it delete."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            _keep(ground.directory / "hub", ground.directory / "whole")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def _keep(directory: Path, whole: Path) -> None:
    """Link every segment a second time, so that it stays when the hub deletes its own name."""
    whole.mkdir(exist_ok=True)
    for path in directory.glob("journal-*"):
        other = whole / path.name
        with suppress(FileNotFoundError, FileExistsError):  # gone meanwhile, or kept by the other thread
            if other.exists() and not other.samefile(path):
                other.unlink()  # its head was not written when the hub was killed: begun anew
            if not other.exists():
                os.link(path, other)
    for name in ("run.toml", "part.json"):
        with suppress(FileNotFoundError):
            copy = whole / f"{name}.{threading.get_ident()}"  # never seen half-written by the other thread
            shutil.copyfile(directory / name, copy)
            copy.replace(whole / name)


def by_share(records: Iterable[Record]) -> tuple[Shares, int]:
    """Return the steps of all merged pushes, each times the share of a round that it counted as.

    Also returns the number of accepted pushes that are not in exactly one merge.
    """
    accepted: dict[tuple[int, int, int], int] = {}
    merges, found = Counter[tuple[int, int, int]](), dict[tuple[int, int], float]()
    for record in records:
        match record:
            case Accepted(push):
                accepted[push.node, push.unit, push.seq] = push.steps
            case Merged(unit, _, parts, _, share):
                for part in parts:
                    merges[part.node, unit, part.seq] += 1
                    steps = accepted[part.node, unit, part.seq] * (1.0 if share is None else share)
                    found[part.node, unit] = found.get((part.node, unit), 0.0) + steps
    return found, sum(merges[key] != 1 for key in accepted)


def differ(anchor: NDArray[np.float32], sums: NDArray[np.float64]) -> int:
    """Return the number of elements that differ by more than single precision adds up to."""
    return int((~np.isclose(anchor, sums, rtol=1e-5, atol=0.02)).sum())


def expected(plan: PacedNode, steps_by_unit: Mapping[tuple[int, int], float]) -> list[NDArray[np.float64]]:
    """Return the anchors that result from these steps by node and unit."""
    found = []
    for unit, numel in enumerate(plan.numels):
        sums = np.zeros(numel)
        for (node, of), steps in steps_by_unit.items():
            if of == unit:
                sums[node % STRIDE :: STRIDE] += steps
        found.append(sums)
    return found


def attempts(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split a ledger at every restart of its node."""
    found: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["event"] == "joined" or not found:
            found.append([])
        found[-1].append(line)
    return found


def owed(attempt: list[dict[str, Any]], units: int) -> int:
    """Return the steps of a node that left which are not in pushes it saw accepted, over all units."""
    if attempt[-1]["event"] != "left":
        return 0
    merged = Counter[int]()
    for push in answered(attempt):
        merged[push.unit] += push.steps if push.verdict == "MERGED" else 0
    return sum(abs(attempt[-1]["steps"] - merged[unit]) for unit in range(units))


def _seen(ledgers: list[list[dict[str, Any]]]) -> Steps:
    seen = Steps()
    for lines in ledgers:
        for push in answered(lines):
            seen[push.node, push.unit] += push.steps if push.verdict == "MERGED" else 0
    return seen


def _unanswered(ledgers: list[list[dict[str, Any]]]) -> Steps:
    """Return the steps in pushes whose node was killed before it saw the answer, accepted or not."""
    found = Steps()
    for attempt in (attempt for lines in ledgers for attempt in attempts(lines)):
        done = {(line["unit"], line["seq"]) for line in attempt if line["event"] == "answered"}
        for line in attempt:
            if line["event"] == "sent" and (line["unit"], line["seq"]) not in done:
                found[attempt[0]["node"], line["unit"]] += line["steps"]
    return found


def mean_s(ledgers: Sequence[list[dict[str, Any]]], ended_s: float) -> float:
    """Return the seconds from a node's first join to the end, mean over nodes."""
    began_s = [lines[0]["t"] for lines in ledgers]
    return float(np.mean([ended_s - t for t in began_s]))


# -- Read the journals of several hubs without the code of the hub, and join them into one history.


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


# -- the benchmark


Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Accounts:
    """Result of the comparison. Without an error all from `lost` on are 0."""

    steps_per_s: float
    """Steps in pushes of the history, mean over units, of all nodes together."""
    acknowledged: int
    """Pushes that a node saw acknowledged."""
    terms: tuple[int, ...]
    """Terms of the history, in order."""
    lost: int
    """Pushes that a node saw acknowledged and that the history lacks, or has with other values."""
    twice: int
    """Pushes that the history has accepted twice, or merged more than once or, at the end, not at all."""
    invented: int
    """Pushes of the history that no node has sent."""
    uncounted: int
    """Steps in pushes of the history that the hub did not count, as if the nodes had claimed too many."""
    wrong: int
    """Elements of the anchors that are not the sum of the steps that the nodes themselves have noted."""
    damaged: int
    """Payloads in the history that are not what was sent."""
    two_leaders: int
    """Terms with more than one leader, by all journals."""
    two_hubs: int
    """Terms in which more than one hub has acknowledged, by the nodes' ledgers."""
    back: int
    """Nodes that saw a unit's version go back within one of their processes."""
    alone: int
    """Pushes of the history that only the leading hub had on disk, after there had been other replicas."""
    missing: int
    """Segments at the beginning of the history of which no copy was kept: nothing can be told of them."""


def errors(parts: Sequence[Accounts]) -> dict[str, int]:
    """Return the number of errors of each kind in the accounts of all parts of a run, by description."""
    names = {
        "lost": "acknowledged pushes that the surviving journal lacks",
        "twice": "pushes accepted twice, or not merged exactly once",
        "invented": "pushes in the journal that no node has sent",
        "damaged": "damaged payloads in the journal",
        "uncounted": "steps that the hub did not count",
        "wrong": "elements of anchors that are not the sum of the nodes' own steps",
        "two_leaders": "terms with two leaders, by the journals of all hubs",
        "two_hubs": "terms in which two hubs acknowledged, by the nodes' ledgers",
        "back": "nodes that saw a version go back",
        "missing": "segments of the journal that no copy has",
    }
    return {text: sum(getattr(part, name) for part in parts) for name, text in names.items()}


def account(
    plan: PacedNode,
    ledgers: Sequence[Lines],
    folder: Path,
    copies: Sequence[Path],
    ended_s: float,
    part: tuple[int, int] = (0, 1),
) -> Accounts:
    """Compare the accounts of a run that has ended, or of part k of n of it.

    folder: of the hub that leads at the end. copies: of all segments of all hubs of the part. ended_s: when
    the nodes were asked to end, by the monotonic clock.
    """
    units = range(part[0], plan.units, part[1])
    ledgers = [[line for line in lines if line.get("unit", units[0]) in units] for lines in ledgers]
    segments = [segment for path in copies if (segment := read(path))]
    history = history_of(folder, segments)
    offers = _noted(ledgers, "offered")
    seen = {(key, crc) for key, by_crc in _noted(ledgers, "acknowledged").items() for crc in by_crc}
    own = {key: offers.get(key, {}).get(crc) for key, crc in history.accepted.items()}
    sums: dict[tuple[int, int], float] = {}
    for key, steps in own.items():
        share = history.shares.get(key, 0.0)
        sums[key[:2]] = sums.get(key[:2], 0.0) + (steps or 0) * share
    anchors, wanted = anchors_of(folder), expected(plan, sums)
    hubs = _hubs(ledgers)
    return Accounts(
        steps_per_s=sum(steps or 0 for steps in own.values()) / len(units) / mean_s(ledgers, ended_s),
        acknowledged=len(seen),
        terms=tuple(history.terms),
        lost=sum(history.accepted.get(key) != crc for key, crc in seen),
        twice=history.repeated + sum(history.merged[key] != 1 for key in history.accepted),
        invented=sum(steps is None for steps in own.values()),
        uncounted=sum(steps or 0 for steps in own.values()) - history.steps,
        wrong=sum(differ(anchors[i], wanted[i]) for i in units),
        damaged=history.damaged,
        two_leaders=sum(len(who) > 1 for who in leaders(segments).values()),
        two_hubs=sum(len(who) > 1 for who in hubs.values()),
        back=sum(_went_back(lines) for lines in ledgers),
        alone=history.alone,
        missing=history.missing,
    )


def _noted(ledgers: Sequence[Lines], event: str) -> dict[Key, dict[int, int]]:
    """Return the steps of all pushes with this event, by push and CRC-32."""
    found: dict[Key, dict[int, int]] = {}
    for line in (line for lines in ledgers for line in lines if line["event"] == event):
        key = line["node"], line["unit"], line["number"]
        found.setdefault(key, {})[line["crc"]] = line["steps"]
    return found


def _hubs(ledgers: Sequence[Lines]) -> dict[int, set[str]]:
    """Return the addresses of the hubs that have acknowledged in each term."""
    found: dict[int, set[str]] = {}
    for line in (line for lines in ledgers for line in lines if line["event"] == "acknowledged"):
        found.setdefault(line["term"], set()).add(line["hub"])
    return found


def _went_back(lines: Lines) -> bool:
    newest: dict[int, int] = {}
    for line in lines:
        if line["event"] == "joined":
            newest = {}
        elif line["event"] == "answered":
            if line["version"] < newest.get(line["unit"], 0):
                return True
            newest[line["unit"]] = line["version"]
    return False


# -- The anchors of a part by unit and version: as a journal has them, and as nodes have received them.


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
