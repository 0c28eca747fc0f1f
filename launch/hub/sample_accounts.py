"""Facts about positions and pushes from the journals of a run directory, without the values of any push."""

import json
from collections.abc import Iterator
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
    Accounts,
    JournalFacts,
    Lease,
    accounts_of,
    read_positions,
    require_run,
)
from aedit.proto.rpc import lineage
from aedit.types import UserError, Verdict

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
    pushes: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Steps of accepted pushes of units that count, by node and unit and then by number, but those of first
    anchors."""
    since: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of the newest push before the journal here begins, by node and unit."""
    renumbered: set[int] = field(default_factory=set)
    """Nodes whose pushes were counted from 1 again."""

    def begin(self) -> None:
        """Take from the state of a snapshot what it says of pushes."""
        for member in self.state.members:
            self.since |= {(member.node, unit): seq for unit, seq in member.received.items()}
            for unit, last in member.decisions.items():
                if last.verdict in (Verdict.REFUSED, Verdict.DISTRUSTED):
                    self.refusals[member.node, unit, last.seq] = last.verdict == Verdict.DISTRUSTED

    def apply(self, record: Record) -> None:
        """Apply a record without the values of pushes and anchors."""
        members = self.state.members
        match record:
            case Accepted(push):
                assert self.state.layout is not None
                is_apart = self.state.layout.units[push.unit].name in self.apart
                self.state.changing(push.node).accept(push, counts=not is_apart)
                if push.base and not is_apart:
                    self.pushes.setdefault((push.node, push.unit), {})[push.seq] = push.steps
                return
            case Merged(unit, _, parts):
                for part in parts:
                    if part.weight == 0:
                        self.refusals[part.node, unit, part.seq] = True
                return
            case Mixed() | SentUp():
                return
            case Refused(node, unit, seq, _, distrusted):
                self.refusals[node, unit, seq] = distrusted
            case Leased(node, start, end):
                self.leases.append(Lease(node, start, end))
            case Joined(name, node) if node >= len(members) or members[node].name != name:
                self._forget(node)
            case _:
                pass
        self.state.apply(record)
        if isinstance(record, Founded):
            self.state.units = {}
        self.term = self.state.term

    def _forget(self, node: int) -> None:
        """Forget the pushes of the node that had an index before, if any: the hub has forgotten it."""
        if any(each == node for each, *_ in (*self.pushes, *self.since, *self.refusals)):
            self.renumbered.add(node)
        self.pushes = {key: each for key, each in self.pushes.items() if key[0] != node}
        self.since = {key: each for key, each in self.since.items() if key[0] != node}
        self.refusals = {key: each for key, each in self.refusals.items() if key[0] != node}


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
    for folder in _folders(run_dir):
        try:
            part = int(json.loads((folder / "part.json").read_text())[0])
        except (OSError, ValueError, TypeError, LookupError):
            raise UserError(f"{folder}/part.json: expected [PART, PARTS]; restore the folder") from None
        replay = _replayed(folder)
        key = replay.term, not (folder / MIRROR).exists()
        if part not in leaders or key > leaders[part][0]:
            leaders[part] = key, replay
    return _joined([leaders[part][1] for part in sorted(leaders)]) if leaders else None


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
            replay.begin()
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


def _joined(parts: list[_Replay]) -> JournalFacts:
    """Return the facts of hubs that split the units: the first one leases, each has its own pushes."""
    pool, names, steps = parts[0].state.pool, dict[int, str](), dict[int, int]()
    numbers, refusals = dict[tuple[int, int], int](), dict[tuple[int, int, int], bool]()
    pushes, since = dict[tuple[int, int], dict[int, int]](), dict[tuple[int, int], int]()
    renumbered = set[int]()
    for part in parts:
        for member in part.state.members:
            if member.name:
                names[member.node] = member.name
                steps[member.node] = steps.get(member.node, 0) + member.steps
                numbers |= {(member.node, unit): seq for unit, seq in member.received.items()}
        refusals |= part.refusals
        pushes |= part.pushes
        since |= part.since
        renumbered |= set(names) if lineage(part.term) else part.renumbered
    unused = [*pool.returned, *(block for each in pool.leases.values() for block in each.values())]
    return JournalFacts(
        watermark=pool.watermark,
        unused=tuple(sorted(unused)),
        leases=tuple(parts[0].leases),
        is_whole=all(part.is_whole for part in parts),
        names=names,
        steps=steps,
        pushes=pushes,
        since=since,
        renumbered=renumbered,
        numbers=numbers,
        refusals=refusals,
    )
