"""Records of one rollout server, from the two files in its own folder.

Each process of the server appends to them. Its clock and its counters begin at 0.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.records.reader import Tail
from aedit.launch.records.records import Notice
from aedit.launch.records.rl_records import KEY_FILE
from aedit.launch.records.values import BAD_LINE, Line, number, text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """State of a server at one time. Counts are those of its process."""

    t: float
    state: str
    rows: float
    tokens: float
    tokens_per_s: float
    samples: float
    """Samples that are over."""
    running: float
    waiting: float
    serial: float
    """Newest version of the line `run`."""
    idle_s: float
    idle_used_s: float
    hub: str
    """Why the hub does not answer; empty while it does."""
    drafter: Line

    @staticmethod
    def of(line: Line) -> "ServingSample":
        """Return the state in a line of metrics."""
        drafter = line.get("drafter")
        names = ("rows", "tokens", "tokens_per_s", "samples", "running", "waiting", "serial")
        return ServingSample(
            t=float(line["t"]),
            state=text(line.get("state") or "?"),
            **{name: number(line.get(name)) for name in (*names, "idle_s", "idle_used_s")},
            hub=text(line.get("hub")),
            drafter=drafter if isinstance(drafter, dict) else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenVersion:
    """A policy version that the server has fetched."""

    serial: int
    num_bytes: float
    seconds: float

    @staticmethod
    def of(line: Line) -> "TakenVersion":
        """Return the version in an event."""
        return TakenVersion(
            serial=int(line["version"]),
            num_bytes=number(line.get("bytes")),
            seconds=number(line.get("seconds")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecords:
    """Records of one rollout server."""

    name: str
    address: str
    num_starts: int
    last_samples: tuple[ServingSample, ...]
    """Last state of each process that has written one."""
    versions: tuple[TakenVersion, ...]
    notices: tuple[Notice, ...]
    """All events but starts and versions."""
    ended: str
    """Why the last process has ended; empty if it has not said so."""
    quiet_s: float
    """Seconds since the server last wrote."""


def is_server_folder(path: Path) -> bool:
    """Return whether `path` is the folder of a rollout server."""
    return (path / KEY_FILE).is_file() and (path / "events.jsonl").is_file()


def read_server(folder: Path) -> ServingRecords:
    """Return the records of the server whose folder this is. Lines that are not its own are skipped."""
    events, metrics = Tail(folder / "events.jsonl"), Tail(folder / "metrics.jsonl")
    starts: list[Line] = []
    versions: list[TakenVersion] = []
    notices: list[Notice] = []
    ended = ""
    for line in events.poll():
        try:
            notice = Notice.of(line)
            if notice.event == "start":
                starts.append(line)
                ended = ""
            elif notice.event == "version":
                versions.append(TakenVersion.of(line))
            else:
                notices.append(notice)
                ended = notice.text if notice.event == "end" else ended
        except BAD_LINE:
            continue
    last_samples = _last_of_each(metrics.poll())
    written_at = max(events.written_at, metrics.written_at)
    newest: Line = starts[-1] if starts else {}
    return ServingRecords(
        name=text(newest.get("name") or folder.resolve().name),
        address=text(newest.get("address")),
        num_starts=len(starts),
        last_samples=tuple(last_samples),
        versions=tuple(versions),
        notices=tuple(notices),
        ended=ended,
        quiet_s=max(0.0, time.time() - written_at) if written_at else 0.0,
    )


def _last_of_each(lines: list[Line]) -> list[ServingSample]:
    """Return the last sample of each process: where time or tokens fall, the next one has begun."""
    found: list[ServingSample] = []
    for line in lines:
        try:
            sample = ServingSample.of(line)
        except BAD_LINE:
            continue
        if found and sample.t >= found[-1].t and not sample.tokens < found[-1].tokens:
            found[-1] = sample
        else:
            found.append(sample)
    return found
