"""Write the records of a node: metrics about once a second, events as they happen."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from aedit.launch.records.sinks import Sink, numbers_of

LINE_EVERY_S = 1.0


@dataclass(slots=True)
class Clock:
    """Time of a node by use, in seconds since the start of the run. Continues over attempts."""

    now: Callable[[], float] = time.monotonic
    busy_s: float = 0.0
    other_s: float = 0.0
    _began_at: float = 0.0

    def start(self, elapsed_s: float) -> None:
        """Continue at `elapsed_s` seconds of the run."""
        self._began_at = self.now() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start of the run."""
        return self.now() - self._began_at


class Recorder:
    """Writer of JSON lines in a node's directory; writes on the first rank of the node only.

    A full disk must not end the training: lines that cannot be written are lost, with one message on stderr.
    """

    def __init__(
        self, directory: Path, clock: Clock, *, writes: bool, sinks: Callable[[], list[Sink]] = list
    ) -> None:
        """Open the files of a node.

        Args:
            directory: Of the node; created if it does not exist.
            clock: Gives each line its time.
            writes: Whether this rank writes.
            sinks: Opens the trackers that receive the numbers too; called on the rank that writes.
        """
        self.directory = directory
        self.clock = clock
        self._files: dict[str, TextIO] = {}
        self._line_at = -LINE_EVERY_S
        self._failed = False
        self._sinks: list[Sink] = []
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(directory / f"{name}.jsonl") for name in ("metrics", "events")}
            self._sinks = sinks()

    def line_is_due(self) -> bool:
        """Return whether a second has passed since the last metrics line. Decide once per node."""
        return self.clock.elapsed_s - self._line_at >= LINE_EVERY_S

    def metrics(self, **values: Any) -> None:
        """Write one line of metrics."""
        self._line_at = self.clock.elapsed_s
        self._write("metrics", values)
        self._tell(numbers_of(values))

    def event(self, event: str, **values: Any) -> None:
        """Write one event."""
        self._write("events", {"event": event, **values})
        if event == "eval":
            self._tell(numbers_of({"held_out_loss": values["loss"], "step": values["step"]}))
        if event == "rl_eval":
            self._tell(numbers_of({"step": values["step"], "held_out": values}))

    def close(self) -> None:
        """Close the files and the sinks."""
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                print(f"aedit: {type(sink).__name__}: {error}", flush=True)

    def _tell(self, values: dict[str, float]) -> None:
        """Pass numbers to the trackers. One that fails is dropped: training does not depend on it."""
        step = int(values.get("step", 0))
        for sink in list(self._sinks):
            try:
                sink.add(values, step)
            except Exception as error:
                print(f"aedit: {type(sink).__name__}: {error}; training continues without it", flush=True)
                self._sinks.remove(sink)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if name not in self._files:
            return
        line = {"t": round(self.clock.elapsed_s, 3), **values}
        try:
            self._files[name].write(json.dumps(_finite(line)) + "\n")
        except OSError as error:
            if not self._failed:
                print(f"aedit: {name}.jsonl: {error}; training continues without it", flush=True)
            self._failed = True


def _open(path: Path) -> TextIO:
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    file = path.open("a", buffering=1, encoding="utf-8")
    if torn and path.stat().st_size:  # a line left incomplete by a crash must not corrupt the next one
        file.write("\n")
    return file


def _finite(value: Any) -> Any:
    """Return the value with NaN and infinity replaced by None, as JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
