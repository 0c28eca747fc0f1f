"""Compare a hub's journal, its anchors and the ledgers of paced nodes."""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules import Accepted, Merged, Record
from aedit.launch.hub import anchors_of, records_of
from benchmarks.kit.cluster import Field, answered
from benchmarks.kit.paced_node import STRIDE, PacedNode

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
            shutil.copyfile(directory / name, whole / name)


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
