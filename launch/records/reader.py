"""Read a run directory, once or repeatedly, also while nodes write to it.

Incomplete lines (a crash, a full disk) are skipped. After a resume the files contain some steps twice: the
lines of the later attempt are used, and those of the earlier attempt after the resumed step are dropped.

A follower with `most_lines` reads a sample of long files: so many lines of metrics and events of rounds,
evenly spaced, and the end of the file. All other events that views show are read, and all rounds in which
something was distrusted or rolled back. All nodes have the same sample of rounds. Of each of more than
`MANY_NODES` nodes it reads half as many lines, and a shorter end.
"""

import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic_core import from_json

from aedit.launch.records.hub_records import HubRecords, HubSample, SwarmSample
from aedit.launch.records.kept_rollouts import KeptRollout, read_rollouts
from aedit.launch.records.records import (
    BAD_LINE,
    KEY_FILE,
    EvalEvent,
    Line,
    Metric,
    Notice,
    RLMetric,
    RoundEvent,
    StartEvent,
    record_of,
)
from aedit.types import UserError

T = TypeVar("T")
Choose = Callable[[bytes, float], list[bytes]]
SHOWN = (
    "alert",
    "alert_over",
    "error",
    "checkpoint_failed",
    "heal",
    "reward_error",
    "average_failed",
    "averages_differ",
)
MOST_ALERTS = 256
"""Active alerts of a node or hub that are followed."""
SHOWN_OF_A_HUB = ("alert", "alert_over", "excluded", "lead", "standby_lost", "banned")
WHOLE_BYTES = 2**15
"""The end of a file of which a sample is read, without gaps; a shorter file is read whole."""
NEWEST_LINES = 16
"""Least number of lines in that end, which is longer if they are."""
MANY_NODES = 32
SHORT_BYTES = 2**13
"""`WHOLE_BYTES` of each of more than `MANY_NODES` nodes."""
CHUNK_BYTES = 2**17
MOST_LINE_BYTES = 2**24
"""A longer line of a file of which a sample is read is skipped."""
OTHER_EVENT_OF_A_HUB = re.compile(
    rb'\{"t": ?[^,"]{1,32}, ?"event": ?"(?!accused|%s)' % "|".join(SHOWN_OF_A_HUB).encode()
)
ID_OF_A_ROUND = re.compile(rb'\{"t": [^,"]{1,32}, "event": "round(?:_refused)?", "id": (\d{1,15}),')
OF_A_ROUND = b'"event": "round'
JUDGED = re.compile(rb'"(?:distrusted|rolled_back)": ?\[(?!\])')
"""Begins a list of units that is not empty."""
HEAD_BYTES = 64
"""Beginning of a line in which its event is named."""


@dataclass(frozen=True, slots=True)
class NodeRecords:
    """Records of one node, each sequence ordered by step."""

    index: int
    starts: tuple[StartEvent, ...]
    metrics: tuple[Metric, ...]
    rounds: tuple[RoundEvent, ...]
    evaluations: tuple[EvalEvent, ...]
    notices: tuple[Notice, ...]
    """Errors, failed checkpoints, repairs of anchors, errors in reward functions, rounds that failed."""

    latest: Notice | None
    """The newest event of any kind."""

    quiet_s: float
    """Seconds since the node last wrote, from the modification times of its files."""

    rl_evaluations: tuple[EvalEvent, ...] = ()
    alerts: tuple[str, ...] = ()
    """Texts of the active alerts."""

    distrusted: int = 0
    """Units of all rounds, also of those that are not in `rounds`, in which the node was distrusted."""

    rolled_back: int = 0
    """The same of those that were rolled back."""

    @property
    def of_attempt(self) -> tuple[Metric, ...]:
        """Return the lines of metrics of the newest attempt."""
        begun_s = self.starts[-1].t if self.starts else -inf
        return tuple(metric for metric in self.metrics if metric.t > begun_s)


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run directory at one time."""

    directory: Path
    config: Mapping[str, Any]
    """Contents of `run.toml`; empty if it cannot be read."""

    nodes: tuple[NodeRecords, ...]
    hubs: tuple[HubRecords, ...] = ()
    """Hubs whose folders are here."""

    swarm: SwarmSample | None = None
    """Peers and parts of a swarm, if a peer has been asked."""

    @property
    def name(self) -> str:
        """Return the name in the configuration, or that of the directory."""
        return str(self.config.get("name") or self.directory.resolve().name)

    @property
    def indices(self) -> list[int]:
        """Return the indices of the nodes whose files are here."""
        return [node.index for node in self.nodes]

    @property
    def alerts(self) -> list[str]:
        """Return the active alerts of all nodes and hubs, each with its source."""
        found = [f"node {node.index}: {text}" for node in self.nodes for text in node.alerts]
        several = len(self.hubs) > 1
        return found + [
            f"hub{f' {k}' if several else ''}: {text}"
            for k, hub in enumerate(self.hubs)
            for text in hub.alerts
        ]

    @property
    def is_rl(self) -> bool:
        """Return whether the run learns from rewards."""
        prompts = self.config.get("prompts")
        written = any(node.metrics[-1].rl is not None for node in self.nodes if node.metrics)
        return written or (isinstance(prompts, dict) and bool(prompts.get("source")))

    @property
    def averages(self) -> bool:
        """Return whether the nodes average with each other by hivemind."""
        swarm = self.config.get("swarm")
        return (
            isinstance(swarm, dict) and bool(swarm.get("discovery")) and swarm.get("exchange") == "hivemind"
        )

    @property
    def has_hub(self) -> bool:
        """Return whether the run has a hub; then each node has its own rounds."""
        named = ((self.config.get("hub"), "address"), (self.config.get("swarm"), "discovery"))
        return bool(self.hubs) or any(isinstance(table, dict) and table.get(key) for table, key in named)


def read_run(run_dir: Path) -> Run:
    """Return all records of a run. Raises UserError if `run_dir` is not a run directory."""
    require_run(run_dir)
    return RunFollower(run_dir).poll()


def require_run(run_dir: Path) -> None:
    """Raise UserError unless `run_dir` is a run directory."""
    if not (run_dir / "run.toml").is_file() and not (run_dir / "nodes").is_dir() and not hub_folders(run_dir):
        inside = Path("runs") / run_dir
        hint = f"did you mean {inside}?" if (inside / "run.toml").is_file() else ""
        if (run_dir / "servers").is_dir():
            hint = (
                "servers/NAME has records of rollout servers, which `aedit status` shows; for the run, name"
                " their hub as HOST:PORT"
            )
        if (run_dir / KEY_FILE).is_file():
            hint = "it is the folder of a rollout server, which `aedit status` shows"
        hint = hint or "name one such as runs/NAME, or a running hub as HOST:PORT"
        raise UserError(f"{run_dir}: not a run directory, since it has no run.toml; {hint}")


def hub_folders(run_dir: Path) -> list[Path]:
    """Return the folders of the hubs that split the units, in order of parts, without the standby's."""
    parts = [path for path in run_dir.glob("hub_*") if path.name[4:].isdecimal() and path.is_dir()]
    return (
        sorted(parts, key=lambda path: int(path.name[4:])) or [run_dir / "hub"] * (run_dir / "hub").is_dir()
    )


def _replica_folders(run_dir: Path) -> dict[str, list[Path]]:
    """Return by hub the folders of those that have led it: its own and the standby's, or those of peers."""
    standbys = [run_dir / "standby", *run_dir.glob("standby_*")]
    found = {path.name: [path, *standbys] for path in hub_folders(run_dir)}
    for path in sorted(run_dir.glob("peers/*/part_*/metrics.jsonl")):
        found.setdefault(path.parent.name, []).append(path.parent)
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


class RunFollower:
    """Reader of a growing run directory; each `poll` parses only new lines. Missing files are no error."""

    def __init__(self, run_dir: Path, most_lines: int | None = None) -> None:
        """Follow `run_dir`, which need not be there yet. most_lines: see the module; None: all lines."""
        self._dir, self._most_lines = run_dir, most_lines
        self._nodes: dict[int, NodeFollower] = {}
        self._hubs: dict[str, HubFollower] = {}

    def poll(self) -> Run:
        """Return all that has been written so far."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._dir / "nodes")
        most, whole_bytes = self._most_lines, WHOLE_BYTES
        if most is not None and len(names) > MANY_NODES:
            most, whole_bytes = most // 2, SHORT_BYTES
        for index in (int(name) for name in names if name.isascii() and name.isdecimal()):
            if index not in self._nodes and str(index) in names:
                folder = self._dir / "nodes" / str(index)
                self._nodes[index] = NodeFollower(folder, index, most, whole_bytes)
        nodes = tuple(self._nodes[index].poll() for index in sorted(self._nodes))
        for name, folders in _replica_folders(self._dir).items():
            self._hubs.setdefault(name, HubFollower(self._most_lines)).follow(folders)
        hubs = tuple(hub.poll() for hub in self._hubs.values())
        config: Mapping[str, Any] = {}
        with suppress(OSError, ValueError):
            config = tomllib.loads((self._dir / "run.toml").read_text(encoding="utf-8"))
        return Run(self._dir, config, nodes, tuple(hub for hub in hubs if hub.lines))

    history = poll

    def rollouts(self, most: int) -> list[KeptRollout]:
        """Return up to `most` rollouts that the nodes have kept, the newest groups first."""
        return read_rollouts(self._dir, most)


class NodeFollower:
    """Reader of the two files of one node, without lines that a resume has invalidated."""

    def __init__(
        self,
        directory: Path,
        index: int,
        most_lines: int | None = None,
        whole_bytes: int = WHOLE_BYTES,
    ) -> None:
        """Follow the node whose files are in `directory`."""
        self._index, self._most_lines = index, most_lines
        self._metrics_tail = Tail(directory / "metrics.jsonl", most_lines, whole_bytes=whole_bytes)
        sample = RoundSample(most_lines) if most_lines is not None else None
        self._events_tail = Tail(
            directory / "events.jsonl", most_lines, choose=sample, whole_bytes=whole_bytes
        )
        self._starts: list[StartEvent] = []
        self._metrics: list[Metric] = []
        self._rounds: dict[int, RoundEvent] = {}
        self._judged: dict[int, RoundEvent] = {}
        """Rounds in which something was distrusted or rolled back."""
        self._evaluations: dict[tuple[int, float], EvalEvent] = {}
        self._rl_evaluations: dict[float, EvalEvent] = {}
        self._notices: list[Notice] = []
        self._latest: Notice | None = None
        self._alerts: dict[str, str] = {}

    def poll(self) -> NodeRecords:
        """Return the records of the node up to now."""
        self._events_tail.each(self._event)
        self._metrics_tail.each(self._metric)
        self._metrics = thinned(self._metrics, self._most_lines)
        if len(kept := thinned_rounds(sorted(self._rounds), self._most_lines)) < len(self._rounds):
            self._rounds = {id: self._rounds[id] for id in kept}
        written_at = max(self._events_tail.written_at, self._metrics_tail.written_at)
        return NodeRecords(
            index=self._index,
            starts=tuple(self._starts),
            metrics=tuple(self._metrics),
            rounds=tuple(self._rounds[id] for id in sorted(self._rounds)),
            evaluations=tuple(self._evaluations.values()),
            notices=tuple(self._notices),
            latest=self._latest,
            quiet_s=max(0.0, time.time() - written_at) if written_at else 0.0,
            rl_evaluations=tuple(self._rl_evaluations.values()),
            alerts=tuple(self._alerts.values()),
            distrusted=sum(len(judged.distrusted) for judged in self._judged.values()),
            rolled_back=sum(len(judged.rolled_back) for judged in self._judged.values()),
        )

    def _event(self, line: Line) -> None:
        notice = Notice.of(line)
        _note_alert(self._alerts, line, notice)
        match notice.event:
            case "start":
                self._start(record_of(StartEvent, line))
            case "round" | "round_refused":
                landed = record_of(RoundEvent, line)
                self._rounds[landed.id] = landed
                self._judged.pop(landed.id, None)
                if landed.distrusted or landed.rolled_back:
                    self._judged[landed.id] = landed
            case "eval":
                evaluation = record_of(EvalEvent, line)
                self._evaluations[evaluation.round, evaluation.step] = evaluation
            case "rl_eval":
                evaluation = record_of(EvalEvent, line)
                self._rl_evaluations[evaluation.step] = evaluation
        self._latest = notice
        if notice.event in SHOWN:
            self._notices.append(notice)

    def _start(self, start: StartEvent) -> None:
        """Drop what earlier attempts have written after the step at which this one begins."""
        self._starts.append(start)
        self._metrics = [metric for metric in self._metrics if not _undone(metric, start)]
        self._rounds = {key: r for key, r in self._rounds.items() if r.step <= start.step}
        self._judged = {key: r for key, r in self._judged.items() if r.step <= start.step}
        self._evaluations = {key: e for key, e in self._evaluations.items() if e.step <= start.step}
        self._rl_evaluations = {key: e for key, e in self._rl_evaluations.items() if e.step <= start.step}

    def _metric(self, line: Line) -> None:
        metric = record_of(Metric, line, rl=RLMetric.of(line.get("rl")))
        if any(_undone(metric, start) for start in self._starts):
            return
        while self._metrics and self._metrics[-1].step >= metric.step:
            self._metrics.pop()
        self._metrics.append(metric)


def _note_alert(active: dict[str, str], line: Line, notice: Notice) -> None:
    """Follow the alerts of a node or hub, whose new process begins without any."""
    match notice.event:
        case "alert":
            if len(active) < MOST_ALERTS:
                active[str(line.get("kind"))] = f"{notice.text} (since {int(notice.t):,} s)"
        case "alert_over":
            active.pop(str(line.get("kind")), None)
        case "start" | "lead":
            active.clear()


def _undone(metric: Metric, start: StartEvent) -> bool:
    return metric.t < start.t and metric.step > start.step


class HubFollower:
    """Reader of the folders of the replicas of a hub, each of which leads under its own terms."""

    def __init__(self, most_lines: int | None = None) -> None:
        """Follow nothing yet."""
        self._most_lines = most_lines
        self._tails: dict[Path, tuple[Tail, Tail]] = {}
        self._lines: list[HubSample] = []
        self._notices: list[Notice] = []
        self._evidence: dict[str, Mapping[str, Any]] = {}
        self._alerts: dict[str, str] = {}

    def follow(self, directories: Iterable[Path]) -> None:
        """Follow the replicas in these folders too, in any order."""
        for path in directories:
            if path not in self._tails:
                self._tails[path] = (
                    Tail(path / "metrics.jsonl", self._most_lines),
                    Tail(path / "events.jsonl", self._most_lines, choose=_shown_of_a_hub),
                )

    def poll(self) -> HubRecords:
        """Return the records of the hub up to now."""
        for metrics, events in self._tails.values():
            metrics.each(lambda line: self._lines.append(HubSample.of(line)))
            events.each(self._event)
        self._lines.sort(key=lambda line: line.term)  # it is stable: within a term they stay as written
        self._lines = thinned(self._lines, self._most_lines)
        self._notices.sort(key=lambda notice: notice.t)
        return HubRecords(
            tuple(self._lines), tuple(self._notices), dict(self._evidence), tuple(self._alerts.values())
        )

    def _event(self, line: Line) -> None:
        notice = Notice.of(line)
        _note_alert(self._alerts, line, notice)
        if notice.event in SHOWN_OF_A_HUB:
            self._notices.append(notice)
        if notice.event == "accused" and isinstance(evidence := line.get("evidence"), Mapping):
            self._evidence[str(line.get("server"))] = evidence


def thinned(values: list[T], most: int | None) -> list[T]:
    """Return the list, or a sample of it if it has more than `4 * most` values: `most` and the newest `most`.

    most: None returns the list as it is.
    """
    if most is None or len(values) <= 4 * most:
        return values
    older, newest = values[:-most], values[-most:]
    return [older[i * len(older) // most] for i in range(most)] + newest


GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples modulo 2^64 are evenly spaced."""


def _is_kept(id: int, every: float) -> bool:
    """Return whether the round is one of about each `every` rounds: evenly spaced, equal for all nodes.

    One that is kept is also kept for each smaller `every`, so that samples of several nodes have rounds in
    common; and their ids have no common divisor, as each fragment may have the rounds of some remainder.
    """
    return (id * GOLDEN & 0xFFFFFFFFFFFFFFFF) * every < 2.0**64


@lru_cache(maxsize=256)
def _kept(first: int, last: int, every: float) -> tuple[int, ...]:
    return tuple(id for id in range(first, last + 1) if _is_kept(id, every))


def thinned_rounds(ids: list[int], most: int | None) -> list[int]:
    """Return the ids of rounds as `thinned` does, but such that several nodes have many in common."""
    if most is None or len(ids) <= 4 * most:
        return ids
    older, newest = ids[:-most], ids[-most:]
    every = (older[-1] - older[0] + 1) / most
    return [id for id in older if _is_kept(id, every)] + newest


class RoundSample:
    """Choice of the lines of a node's events that are read: all but those of most rounds."""

    def __init__(self, most_rounds: int) -> None:
        """Choose about so many rounds."""
        self._most, self._every = most_rounds, 0.0

    def __call__(self, text: bytes, share: float) -> list[bytes]:
        """Return those of the lines of the text that are read. share: its part of the file."""
        lines, judged = text.split(b"\n"), JUDGED.search(text) is not None
        places = [
            i
            for i, line in enumerate(lines)
            if line.find(OF_A_ROUND, 0, HEAD_BYTES) >= 0 and not (judged and JUDGED.search(line))
        ]
        if not places:
            return lines
        if not self._every:
            self._every = max(1.0, len(places) / share / self._most)
        left_out = set(places).difference(self._sampled(lines, places))
        return [line for i, line in enumerate(lines) if i not in left_out]

    def _sampled(self, lines: list[bytes], places: list[int]) -> Iterable[int]:
        """Return those of the places of rounds that are read."""
        first, last = _id_of(lines[places[0]]), _id_of(lines[places[-1]])
        if last - first + 1 == len(places):  # then the ids rise by one, unless an attempt repeats some
            kept = {id: places[id - first] for id in _kept(first, last, self._every)}
            if all(_id_of(lines[place]) == id for id, place in kept.items()):
                return kept.values()
        return [place for place in places if (id := _id_of(lines[place])) < 0 or _is_kept(id, self._every)]


def _id_of(line: bytes) -> int:
    """Return the id of a round; -1 for a line of another form."""
    found = ID_OF_A_ROUND.match(line)
    return int(found[1]) if found else -1


def _shown_of_a_hub(text: bytes, share: float) -> list[bytes]:
    return [line for line in text.split(b"\n") if not OTHER_EVENT_OF_A_HUB.match(line)]


class Tail:
    """Reader of the complete lines that were added to a JSON lines file.

    Lines that do not parse are skipped.
    """

    def __init__(
        self,
        path: Path,
        most_lines: int | None = None,
        *,
        choose: Choose | None = None,
        whole_bytes: int = WHOLE_BYTES,
    ) -> None:
        """Follow the file at `path`, which need not be there yet.

        Args:
            path: The file.
            most_lines: Lines of a long file that are read before its end, evenly spaced; None: all.
            choose: Returns the lines of a text that are read, of a long file before its end. Called with
                whole lines and their share of that part; None: `most_lines`.
            whole_bytes: End of a long file that is read without gaps.
        """
        self._path, self._most_lines, self._choose = path, most_lines, choose
        self._whole_bytes = whole_bytes
        self._offset = 0
        self._rest = b""
        self.written_at = 0.0
        """The file's modification time, in seconds since the epoch; 0 while there is no file."""
        self.read_bytes = 0
        """Bytes that were read so far."""

    def each(self, take: Callable[[Line], None]) -> None:
        """Call `take` with each line added since the last call. Lines that it cannot read are skipped."""
        with suppress(OSError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            self.written_at = found.st_mtime
            if self._most_lines is not None and found.st_size - self._offset > 4 * self._whole_bytes:
                self._rest = b""
                self._sample(file, self._whole_from(file, found.st_size), self._most_lines, take)
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            self.read_bytes += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            _take(lines, take)

    def _sample(self, file: BinaryIO, end: int, most: int, take: Callable[[Line], None]) -> None:
        """Take lines that begin before `end`, where one begins, and set the offset to it."""
        if self._choose is not None:
            self._filter(file, end, self._choose, take)
            return
        start = self._offset
        for k in range(most):
            file.seek(max(self._offset, start + k * (end - start) // most))
            if k:
                self.read_bytes += len(file.readline(MOST_LINE_BYTES))  # the rest of a line
            if file.tell() >= end:
                break
            line = file.readline(MOST_LINE_BYTES)
            self.read_bytes += len(line)
            self._offset = file.tell()
            _take([line], take)
        self._offset = max(self._offset, end)

    def _whole_from(self, file: BinaryIO, size: int) -> int:
        """Return where the first line begins of those at the end of the file that are all read."""
        num_bytes = self._whole_bytes
        while num_bytes < size - self._offset:
            file.seek(size - num_bytes)
            _, _, behind = (end := file.read(num_bytes)).partition(b"\n")
            self.read_bytes += len(end)
            if behind.count(b"\n") >= NEWEST_LINES:
                return size - len(behind)
            num_bytes *= 4
        return self._offset

    def _filter(
        self,
        file: BinaryIO,
        end: int,
        choose: Choose,
        take: Callable[[Line], None],
    ) -> None:
        """Take the lines that begin before `end` and that `choose` returns."""
        file.seek(self._offset)
        rest, num_bytes = b"", end - self._offset
        while file.tell() < end and (chunk := file.read(min(CHUNK_BYTES, end - file.tell()))):
            self.read_bytes += len(chunk)
            text, _, after = (rest + chunk).rpartition(b"\n")
            rest = after if len(after) <= MOST_LINE_BYTES else b""
            _take(choose(text, len(chunk) / num_bytes), take)
        self._offset, self._rest = file.tell(), rest


def _take(lines: Iterable[bytes], take: Callable[[Line], None]) -> None:
    for text in lines:
        if text and (line := _parsed(text)) is not None:
            try:
                take(line)
            except BAD_LINE:  # valid JSON that is none of our lines: skipped like a torn one
                continue


def _parsed(text: bytes) -> Line | None:
    try:
        line = from_json(text)
    except ValueError:
        line = _parsed_slowly(text)
    return line if isinstance(line, dict) else None


def _parsed_slowly(text: bytes) -> Any:
    """Return the value of a text that is torn, or that has half of a surrogate pair; None for any other."""
    # A crash may leave half a line without its end; the next attempt's first line then follows right behind.
    for candidate in (text, text[max(text.rfind(b'{"'), 0) :]):
        with suppress(ValueError, RecursionError):
            return json.loads(candidate)
    return None
