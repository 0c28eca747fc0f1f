"""Facts about positions and pushes from the journals of a run directory, without the values of any push."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aedit.async_sgd.hub import HubState, load_state
from aedit.async_sgd.journal import (
    Damaged,
    File,
    batches,
    read_snapshot,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.async_sgd.rules import Accepted, Founded, Joined, Leased, Merged, Mixed, Record, Refused, SentUp
from aedit.launch.config import load, unit_rules
from aedit.launch.hub.folder import MIRROR
from aedit.launch.records import (
    BAD_LINE,
    Accounts,
    JournalFacts,
    Lease,
    Line,
    Tail,
    accounts_of,
    read_positions,
    require_run,
)
from aedit.types import UserError

_FOLDERS = ("hub", "hub_*", "standby", "standby_*", "peers/*/part_*")


@dataclass(slots=True)
class _Replay:
    """State of one hub without units, and what the state does not keep."""

    state: HubState
    apart: frozenset[str]
    is_whole: bool
    term: int = 0
    leases: list[Lease] = field(default_factory=list)
    refusals: dict[tuple[int, int, int], bool] = field(default_factory=dict)
    begins: dict[int, list[tuple[set[int], dict[int, int], int]]] = field(default_factory=dict)
    """Attempts of each node: sessions, newest push by unit before, process."""
    pushes: Counter[int] = field(default_factory=Counter)
    """Accepted pushes of units that count, by node, but those of first anchors."""

    def apply(self, record: Record) -> None:
        """Apply a record without the values of pushes and anchors."""
        match record:
            case Accepted(push):
                assert self.state.layout is not None
                is_apart = self.state.layout.units[push.unit].name in self.apart
                self.state.changing(push.node).accept(push, counts=not is_apart)
                if push.base == 0:
                    self._founded(push.node, push.unit, push.seq)
                elif not is_apart:
                    self.pushes[push.node] += 1
                return
            case Merged(unit, _, parts):
                for part in parts:
                    if part.weight == 0:
                        self.refusals[part.node, unit, part.seq] = True
                return
            case Mixed() | SentUp():
                return
            case Refused(node, unit, seq, reason, distrusted):
                self.refusals[node, unit, seq] = distrusted
                if reason.startswith("founded"):
                    self._founded(node, unit, seq)
            case Leased(node, start, end):
                self.leases.append(Lease(node, start, end))
            case Joined(node=node, session=session, process=process):
                self._join(node, session, process)
            case _:
                pass
        self.state.apply(record)
        if isinstance(record, Founded):
            self.state.units = {}
        self.term = self.state.term

    def name_of(self, node: int) -> str:
        """Return the name of a node; "" for one that is not known."""
        return self.state.members[node].name if node < len(self.state.members) else ""

    def _founded(self, node: int, unit: int, seq: int) -> None:
        """Count a push of first anchors as one before the attempt: it has no steps."""
        if begins := self.begins.get(node):
            begins[-1][1][unit] = seq

    def _join(self, node: int, session: int, process: int) -> None:
        begins = self.begins.setdefault(node, [])
        known = self.state.members[node] if node < len(self.state.members) else None
        if begins and process and begins[-1][2] == process:
            begins[-1][0].add(session)
        else:
            begins.append(({session}, dict(known.received) if known else {}, process))


def read_accounts(run_dir: Path) -> Accounts:
    """Return the accounts of the samples of the run in a directory. Raises UserError if it has none."""
    require_run(run_dir)
    return accounts_of(read_positions(run_dir), journal_facts(run_dir))


def accounts_line(run_dir: Path) -> str:
    """Return the result of the accounts as one line, for the report of a run."""
    try:
        return read_accounts(run_dir).summary()
    except UserError as error:
        return f"not accounted for: {error}"


def journal_facts(run_dir: Path) -> JournalFacts | None:
    """Return the facts of the hubs whose folders are in the run directory; None if there is none.

    Of the replicas of a hub, the one that has led under the highest term. Raises UserError if a journal is
    damaged before its end.
    """
    leaders: dict[int, tuple[tuple[int, bool], _Replay]] = {}
    events: dict[int, list[Line]] = {}
    for folder in _folders(run_dir):
        try:
            part = int(json.loads((folder / "part.json").read_text())[0])
        except (OSError, ValueError, TypeError, LookupError):
            raise UserError(f"{folder}/part.json: expected [PART, PARTS]; restore the folder") from None
        replay = _replayed(folder)
        Tail(folder / "events.jsonl").each(events.setdefault(part, []).append)
        key = replay.term, not (folder / MIRROR).exists()
        if part not in leaders or key > leaders[part][0]:
            leaders[part] = key, replay
    # A replica that was removed leaves its events.
    for path in sorted(run_dir.glob("peers/*/part_*/events.jsonl")):
        number = path.parent.name.removeprefix("part_")
        if number.isascii() and number.isdecimal() and not (path.parent / "part.json").exists():
            Tail(path).each(events.setdefault(int(number), []).append)
    if not leaders:
        return None
    return _joined([leaders[part][1] for part in sorted(leaders)], [events[part] for part in sorted(leaders)])


def _folders(run_dir: Path) -> Iterator[Path]:
    for pattern in _FOLDERS:
        for path in sorted(run_dir.glob(pattern)):
            if (path / "part.json").is_file() and (path / "run.toml").is_file():
                yield path


def _replayed(folder: Path) -> _Replay:
    """Return the state at the end of the folder's journal, from as early as that goes back."""
    rules = unit_rules(load(folder / "run.toml", []).config)
    segments, snapshots = segment_numbers(folder, "journal"), segment_numbers(folder, "snapshot")
    replay, first = _Replay(HubState(), frozenset(rules), is_whole=True), 1
    if 1 not in segments:
        for number in snapshots:
            try:
                state = HubState()
                load_state((read_snapshot(snapshot_path(folder, number))[0], ()), state)
            except Damaged:
                continue
            replay, first = _Replay(state, frozenset(rules), is_whole=False, term=state.term), number
            break
        else:
            if segments:
                raise UserError(
                    f"{folder}: neither the first segment nor a whole snapshot is there; restore it"
                )
    for number in segments:
        if number < first:
            continue
        try:
            for batch, _ in batches(File(segment_path(folder, number))):
                for record in batch:
                    replay.apply(record)
        except (Damaged, FileNotFoundError) as error:
            if number != segments[-1]:  # the end of the newest one is being written
                raise UserError(f"{error}: restore the folder {folder} from a copy") from None
        except (AssertionError, LookupError) as error:
            raise UserError(
                f"{segment_path(folder, number)}: its records do not follow those before ({error!r});"
                " restore the folder from a copy"
            ) from None
    return replay


def _joined(parts: list[_Replay], events: list[list[Line]]) -> JournalFacts:
    """Return the facts of hubs that split the units: the first one leases, each has its own pushes."""
    pool, names, steps = parts[0].state.pool, dict[int, str](), dict[int, int]()
    numbers, refusals = dict[tuple[int, int], int](), dict[tuple[int, int, int], bool]()
    pushes = Counter[int]()
    for part in parts:
        for member in part.state.members:
            if member.name:
                names[member.node] = member.name
                steps[member.node] = steps.get(member.node, 0) + member.steps
                numbers |= {(member.node, unit): seq for unit, seq in member.received.items()}
        refusals |= part.refusals
        pushes += part.pushes
    unused = [*pool.returned, *(block for each in pool.leases.values() for block in each.values())]
    return JournalFacts(
        watermark=pool.watermark,
        unused=tuple(sorted(unused)),
        leases=tuple(parts[0].leases),
        is_whole=all(part.is_whole for part in parts),
        names=names,
        steps=steps,
        pushes=pushes,
        numbers=numbers,
        refusals=refusals,
        begins={node: _begins(parts, events, node) for node in names},
    )


def _begins(
    parts: list[_Replay], events: list[list[Line]], node: int
) -> tuple[tuple[frozenset[int], dict[int, int]], ...]:
    """Return the attempts of a node, as the first hub has seen them; the others know them by process."""
    known = [_known_begins(part, each, node) for part, each in zip(parts, events, strict=True)]
    found = []
    for sessions, before, process in known[0]:
        newest = dict(before)
        for other in known[1:]:
            newest |= next((b for _, b, p in other if process and p == process), {})
        found.append((frozenset(sessions), newest))
    return tuple(found)


_Begin = tuple[set[int], dict[int, int], int]
"""Sessions, number of the newest push by unit before, and process of an attempt."""


def _known_begins(part: _Replay, events: list[Line], node: int) -> list[_Begin]:
    """Return the attempts of a node at one hub: by its journal, and by its events before that begins."""
    found = part.begins.get(node, [])
    if part.is_whole:
        return found
    sessions = {session for each, _, _ in found for session in each}
    firsts, of_process = set[tuple[int, int]](), dict[int, _Begin]()
    for line in events:
        with suppress(*BAD_LINE):
            if line.get("node") != node or line.get("name", part.name_of(node)) != part.name_of(node):
                continue
            if line["event"] == "first_anchor" or str(line.get("reason", "")).startswith("founded"):
                firsts.add((int(line["unit"]), int(line["seq"])))
            elif line["event"] == "join" and line["session"] not in sessions:
                process = int(line["process"])
                before = {int(unit): int(number) for unit, number in line["pushes"]}
                known = of_process.get(process, (set(), before, process))
                first = min(known[1], before, key=lambda each: sum(each.values()))
                of_process[process] = {*known[0], int(line["session"])}, first, process
    early = list(of_process.values())
    for _, before, _ in early:
        for unit in {unit for unit, _ in firsts}:
            while (unit, before.get(unit, 0) + 1) in firsts:
                before[unit] = before.get(unit, 0) + 1
    early.sort(key=lambda begin: sum(begin[1].values()))
    if early and found and early[-1][2] == found[0][2]:
        return [*early[:-1], (early[-1][0] | found[0][0], early[-1][1], found[0][2]), *found[1:]]
    return [*early, *found]
