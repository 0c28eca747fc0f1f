"""Records of one rollout server, from the two files in its own folder.

Each process of the server appends to them. Its clock and its counters begin at 0.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from aedit.launch.records.reader import Tail
from aedit.launch.records.records import KEY_FILE, Line, Notice, record_of, text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """State of a server at one time. Counts are those of its process."""

    t: float
    state: str = "?"
    rows: float = nan
    tokens: float = nan
    tokens_per_s: float = nan
    samples: float = nan
    """Samples that are over."""
    running: float = nan
    waiting: float = nan
    idle_s: float = nan
    idle_used_s: float = nan
    hub: str = ""
    """Why the hub does not answer; empty while it does."""
    drafter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecords:
    """Records of one rollout server."""

    name: str
    address: str
    num_starts: int
    last_samples: tuple[ServingSample, ...]
    """Last state of each process that has written one."""
    versions: tuple[Line, ...]
    """Events of the policy versions that it has fetched."""
    notices: tuple[Notice, ...]
    """All events but starts and versions."""
    ended: str
    """Why the last process has ended; empty if it has not reported it."""
    quiet_s: float
    """Seconds since the server last wrote."""


def is_server_folder(path: Path) -> bool:
    """Return whether `path` is the folder of a rollout server."""
    return (path / KEY_FILE).is_file() and (path / "events.jsonl").is_file()


def read_server(folder: Path) -> ServingRecords:
    """Return the records of the server whose folder this is. Lines that are not its own are skipped."""
    events, metrics = Tail(folder / "events.jsonl"), Tail(folder / "metrics.jsonl")
    starts: list[Line] = []
    versions: list[Line] = []
    notices: list[Notice] = []
    ended = ""

    def take_event(line: Line) -> None:
        nonlocal ended
        notice = Notice.of(line)
        if notice.event == "start":
            starts.append(line)
            ended = ""
        elif notice.event == "version":
            versions.append({**line, "version": int(line["version"])})
        else:
            notices.append(notice)
            ended = notice.text if notice.event == "end" else ended

    last_samples: list[ServingSample] = []

    def take_metrics(line: Line) -> None:
        """Keep the last sample of each process: where time or tokens fall, the next one has begun."""
        sample = record_of(ServingSample, line)
        if last_samples and sample.t >= last_samples[-1].t and not sample.tokens < last_samples[-1].tokens:
            last_samples.pop()
        last_samples.append(sample)

    events.each(take_event)
    metrics.each(take_metrics)
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
