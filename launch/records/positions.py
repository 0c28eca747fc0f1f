"""Records of the stream's positions: what a node has drawn, generated, trained and pushed.

Each rank of a node appends to a file of its own, the first one to `positions.jsonl`. What a push contains is
written before the push is sent, so a killed node leaves no push without a record. A line covers the steps of
a second, or those since the last round; positions are ranges, so the file grows by rounds and seconds, in
reinforcement learning by one line per group. `accounts` adds the records up.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.types import UserError

FLUSH_EVERY_S = 1.0
"""Longest time that trained steps stay in memory."""
MOST_POSITIONS = 1 << 28
"""Positions of a run that are accounted for: they are added up in memory."""
Positions = NDArray[np.int64]
Line = Mapping[str, Any]


class PositionLog:
    """Writer of one rank's records of positions. Without a directory it writes nothing.

    A full disk must not end the training: lines that cannot be written are counted, and the count follows.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        rank: int = 0,
        elapsed_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Append to the file of this rank.

        Args:
            directory: Of the node; it exists.
            rank: Of this process within the node.
            elapsed_s: Returns the seconds since the start of the run.
        """
        self.rank, self._elapsed_s = rank, elapsed_s
        self._steps: list[tuple[int, Positions]] = []
        self._flushed_s = time.monotonic()
        self._num_lost = 0
        self._warmup: object = 0
        self._fd = -1
        if directory is not None:
            path = directory / positions_name(rank)
            with suppress(OSError):
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def leads(self) -> bool:
        """Return whether this rank writes what all ranks of the node know."""
        return self.rank == 0

    def start(self, **facts: Any) -> None:
        """Begin an attempt; see `Attempt` for the facts."""
        self._warmup = facts.get("warmup", 0)
        self._write("start", facts)

    def drawn(self, place: int, positions: Positions) -> None:
        """Note prompts that the node has drawn. place: the number of its draws before them."""
        if self.leads:
            self._write("drawn", {"place": place, "positions": ranges_of(positions)})

    def group(self, position: int, **facts: Any) -> None:
        """Note a rewarded group of this rank; see `GroupRecord` for the facts."""
        self._write("group", {"position": position, **facts})

    def put_back(self, place: int) -> None:
        """Note that what was drawn from this place on, and not trained, goes back to the stream."""
        if self.leads:
            self._write("put_back", {"place": place})

    def trained(self, step: int, positions: Sequence[int] | Positions) -> None:
        """Note the positions that an inner step of this rank has trained; `sync.step` follows."""
        if self._fd >= 0:
            self._steps.append((step, np.asarray(positions, np.int64)))
            if step == self._warmup or time.monotonic() - self._flushed_s > FLUSH_EVERY_S:
                self.flush()

    def flush(self) -> None:
        """Write the steps that are still in memory."""
        self._flushed_s = time.monotonic()
        if self._steps:
            steps, positions = zip(*self._steps, strict=True)
            self._steps = []
            ranges = ranges_of(np.concatenate(positions))
            self._write("trained", {"from": steps[0], "to": steps[-1], "positions": ranges})

    def opened(
        self,
        round_id: int,
        step: int,
        units: Sequence[int],
        unsent: Iterable[int] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Note that a round is about to send these units with what all steps up to `step` have trained.

        unsent: units that the node itself distrusts. numbers: those that the hub gives the pushes, one per
        unit: by them `accounts` finds a push in the journal.
        """
        self.flush()
        if self.leads:
            facts = {"id": round_id, "step": step, "units": _units(units), "unsent": sorted(unsent)}
            self._write("open", facts | ({"numbers": list(numbers)} if any(numbers) else {}))

    def ended(self, round_id: int, step: int, **units: Sequence[int]) -> None:
        """Note the end of a round at `step`: which units were refused, distrusted or rolled back."""
        if self.leads:
            named = {name: list(each) for name, each in units.items() if each}
            self._write("round", {"id": round_id, "step": step, **named})

    def stop(self, step: int, reason: str) -> None:
        """Note that the attempt has ended in good order."""
        self.flush()
        if self.leads:
            self._write("stop", {"step": step, "reason": reason})

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, event: str, facts: Mapping[str, Any]) -> None:
        if self._fd < 0:
            return
        line = {"t": round(self._elapsed_s(), 3), "event": event, **facts}
        lost = {"event": "lost", "lines": self._num_lost}
        text = "".join(json.dumps(each) + "\n" for each in ([lost] if self._num_lost else []) + [line])
        data = text.encode()
        try:
            size = os.fstat(self._fd).st_size
            if os.write(self._fd, data) < len(data):  # a full disk: no half of a line stays
                os.ftruncate(self._fd, size)
                self._num_lost += 1
            else:
                self._num_lost = 0
        except OSError:
            self._num_lost += 1


def positions_name(rank: int) -> str:
    """Return the name of the file of a rank in the directory of its node."""
    return "positions.jsonl" if rank == 0 else f"positions_{rank}.jsonl"


def _units(units: Sequence[int]) -> list[list[int]]:
    return ranges_of(np.asarray(units, np.int64))


def ranges_of(positions: Positions) -> list[list[int]]:
    """Return the positions, in their order, as [start, end) or [start, end, stride]; int64, shape [n]."""
    steps, found, i, last = np.diff(positions), [], 0, len(positions) - 1
    edges = [*np.flatnonzero(np.diff(steps)) + 1, last] if last > 0 else []
    edge = 0
    while i <= last:
        start = int(positions[i])
        while edge < len(edges) and edges[edge] <= i:
            edge += 1
        stride = int(steps[i]) if i < last else 0
        upto = int(edges[edge]) if i < last else i
        if stride == 1:
            found.append([start, int(positions[upto]) + 1])
        elif stride > 1 and upto > i + 1:
            found.append([start, int(positions[upto]) + 1, stride])
        else:
            upto = i
            found.append([start, start + 1])
        i = upto + 1
    return found


@dataclass(frozen=True, slots=True)
class Trained:
    """Positions that the inner steps `first` to `last` of one rank have trained."""

    rank: int
    first: int
    last: int
    ranges: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One rewarded group, by the rank that finished it."""

    position: int
    index: int
    """Of the problem in its source."""
    lengths: tuple[int, ...]
    """Tokens per rollout."""
    rewards: tuple[float | None, ...]
    versions: tuple[int, int]
    """Oldest and newest policy version that has generated a token; (0, -1) without one."""
    places: tuple[str, ...]
    """Names of the rollout servers and nodes that have generated tokens, besides the node itself."""
    replaced: bool
    """Whether dynamic sampling draws another prompt in its place."""


@dataclass(frozen=True, slots=True)
class Event:
    """`open`, `round`, `put_back` or `stop` of the first rank; fields that do not apply are empty."""

    kind: str
    id: int = 0
    step: int = 0
    units: tuple[int, ...] = ()
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Why by unit: steps that do not count. Of `open`: units that are not sent."""
    numbers: Mapping[int, int] = field(default_factory=dict)
    """Number that a push has at the hub, or would have, by unit; empty in records of earlier versions."""
    refused: tuple[int, ...] = ()
    """Units whose steps are in the next push again."""
    place: int = 0
    whole: bool = True
    """Whether a node that stops has landed all its rounds."""


@dataclass(slots=True)
class Attempt:
    """Records of one start of a node, of all its ranks."""

    node: int
    number: int
    step: int
    """Inner steps at its start; later ones of earlier attempts are undone in a run without a hub."""
    kind: str
    """`text` or `rl`."""
    units: tuple[int, ...]
    """Units of the model; those of a drafter are left out."""
    leases: bool
    """Whether a hub leases the positions."""
    warmup: float
    """Steps up to this one are averaged over the nodes as they are taken."""
    name: str = ""
    events: list[Event] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    drawn: list[tuple[int, tuple[slice, ...]]] = field(default_factory=list)
    """Place of the first draw, and positions."""
    groups: list[GroupRecord] = field(default_factory=list)
    lost_lines: int = 0

    @property
    def ended(self) -> bool:
        """Return whether the attempt has ended in good order, with the answers to all its pushes."""
        return any(event.kind == "stop" and event.whole for event in self.events)


def read_positions(run_dir: Path) -> dict[int, list[Attempt]]:
    """Return the attempts of each node whose records are in the run directory, in order.

    Raises UserError if there are none, or a line cannot be read.
    """
    found: dict[int, list[Attempt]] = {}
    for path in sorted(run_dir.glob("nodes/*/positions.jsonl")):
        if path.parent.name.isascii() and path.parent.name.isdecimal():
            attempts = _attempts(path, 0, int(path.parent.name))
            for other in sorted(path.parent.glob("positions_*.jsonl")):
                if rank := re.fullmatch(r"positions_(\d{1,6})\.jsonl", other.name):
                    _merge(attempts, _attempts(other, int(rank[1]), int(path.parent.name)), other)
            found[int(path.parent.name)] = attempts
    if not any(found.values()):
        raise UserError(
            f"{run_dir}: no records of positions, expected nodes/N/positions.jsonl with at least one start;"
            " use the directory of the machine on which nodes have trained"
        )
    return found


def _merge(attempts: list[Attempt], others: list[Attempt], path: Path) -> None:
    known = {attempt.number: attempt for attempt in attempts}
    for other in others:
        if other.number not in known:
            raise UserError(
                f"{path}: attempt {other.number} is not in positions.jsonl beside it; restore both files"
            )
        mine = known[other.number]
        mine.trained += other.trained
        mine.groups += other.groups
        mine.lost_lines += other.lost_lines


def _attempts(path: Path, rank: int, node: int) -> list[Attempt]:
    attempts: list[Attempt] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    if not text.endswith(b"\n"):
                        raise ValueError("it is cut off")
                    _take(attempts, json.loads(text), rank, node)
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                    what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
                    raise UserError(
                        f"{path}: line {number} is no record of positions ({what[:100]}); restore the file:"
                        " without this line samples cannot be accounted for"
                    ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return attempts


def _take(attempts: list[Attempt], line: Any, rank: int, node: int) -> None:
    """Add a line to the newest attempt, or begin one. Raises an error of `_attempts` for a bad line."""
    if not isinstance(line, dict):
        raise ValueError("expected an object")
    kind = line["event"]
    if kind == "start":
        if _number(line["node"]) != node:
            raise ValueError(f"node is {line['node']!r}, and the directory is that of node {node}")
        if line["kind"] not in ("text", "rl"):
            raise ValueError(f"kind is {line['kind']!r}, expected 'text' or 'rl'")
        warmup = line.get("warmup", 0)
        attempts.append(
            Attempt(
                node=node,
                number=_number(line["attempt"]),
                step=_number(line["step"]),
                kind=line["kind"],
                units=_numbers(_slices(line["units"])),
                leases=bool(line["leases"]),
                warmup=float("inf") if warmup == "all" else _number(warmup),
                name=str(line.get("name", "")),
            )
        )
        return
    if not attempts:
        raise ValueError("no start comes before it")
    attempt = attempts[-1]
    match kind:
        case "trained":
            first, last = _number(line["from"]), _number(line["to"])
            attempt.trained.append(Trained(rank, first, last, _slices(line["positions"])))
        case "drawn":
            attempt.drawn.append((_number(line["place"]), _slices(line["positions"])))
        case "group":
            attempt.groups.append(_group(line))
        case "open":
            dropped = {_number(unit): "distrusted by its own node" for unit in line["unsent"]}
            units = _numbers(_slices(line["units"]))
            numbers = tuple(map(_number, line.get("numbers", ())))
            if numbers and len(numbers) != len(units):
                raise ValueError(f"{len(numbers)} numbers of {len(units)} units")
            known = dict(zip(units, numbers, strict=False))
            attempt.events.append(
                Event("open", _number(line["id"]), _number(line["step"]), units, dropped, known)
            )
        case "round":
            why = {"distrusted": "its push was distrusted", "rolled_back": "its round was rolled back"}
            dropped = {_number(u): text for name, text in why.items() for u in line.get(name, ())}
            refused = tuple(map(_number, line.get("refused", ())))
            attempt.events.append(
                Event("round", _number(line["id"]), _number(line["step"]), (), dropped, refused=refused)
            )
        case "put_back":
            attempt.events.append(Event("put_back", place=_number(line["place"])))
        case "stop":
            whole = line["reason"] in ("done", "signal")
            attempt.events.append(Event("stop", step=_number(line["step"]), whole=whole))
        case "lost":
            attempt.lost_lines += _number(line["lines"])
        case _:
            raise ValueError(f"event is {str(kind)[:40]!r}")


def _group(line: Line) -> GroupRecord:
    oldest, newest = line["versions"] or (0, -1)
    rewards = tuple(None if each is None else float(each) for each in line["rewards"])
    lengths = tuple(map(_number, line["lengths"]))
    if len(rewards) != len(lengths):
        raise ValueError(f"{len(rewards)} rewards of {len(lengths)} rollouts")
    return GroupRecord(
        position=_number(line["position"], most=MOST_POSITIONS),
        index=_number(line["index"]),
        lengths=lengths,
        rewards=rewards,
        versions=(int(oldest), int(newest)),
        places=tuple(map(str, line.get("places", ()))),
        replaced=bool(line["replaced"]),
    )


def _number(value: Any, most: int = 1 << 53) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from 0 to {most - 1}")
    return value


def _slices(ranges: Any) -> tuple[slice, ...]:
    """Return ranges as slices. Raises ValueError for one that is none, or beyond `MOST_POSITIONS`."""
    found = []
    for start, end, *stride in ranges:
        first, last = _number(start, MOST_POSITIONS), _number(end, MOST_POSITIONS + 1)
        step = _number(stride[0]) if stride else 1
        if not first < last or not step:
            raise ValueError(f"[{start}, {end}] is no range")
        found.append(slice(first, last, step))
    return tuple(found)


def _numbers(slices: Iterable[slice]) -> tuple[int, ...]:
    return tuple(number for each in slices for number in range(each.start, each.stop, each.step))
