"""What a node writes down about itself: metrics about once a second, events as they happen."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from aedit.types import UserError

LINE_EVERY_S = 1.0


@dataclass(slots=True)
class Clock:
    """Where a node's time goes, in seconds since the run began. Continues over attempts."""

    now: Callable[[], float] = time.monotonic
    busy_s: float = 0.0
    other_s: float = 0.0
    _began_at: float = 0.0

    def start(self, elapsed_s: float) -> None:
        """Go on at `elapsed_s` seconds of the run."""
        self._began_at = self.now() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        return self.now() - self._began_at


class Recorder:
    """JSON lines in a node's directory; silent on all ranks but the node's first.

    A full disk must not end the training: what cannot be written is lost, and said once on stderr.
    """

    def __init__(self, directory: Path, clock: Clock, *, writes: bool, tensorboard: bool = False) -> None:
        self.directory = directory
        self.clock = clock
        self._files: dict[str, TextIO] = {}
        self._line_at = -LINE_EVERY_S
        self._failed = False
        self._board: Any = None
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(directory / f"{name}.jsonl") for name in ("metrics", "events")}
            self._board = _board(directory) if tensorboard else None

    def line_is_due(self) -> bool:
        """Whether a second has passed since the last metrics line. Decide once per node."""
        return self.clock.elapsed_s - self._line_at >= LINE_EVERY_S

    def metrics(self, **values: Any) -> None:
        """Write one line of metrics."""
        self._line_at = self.clock.elapsed_s
        self._write("metrics", values)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, values["step"])

    def event(self, event: str, **values: Any) -> None:
        """Write one event."""
        self._write("events", {"event": event, **values})
        if self._board is not None and event == "eval":
            self._board.add_scalar("held_out_loss", values["loss"], values["step"])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if name not in self._files:
            return
        line = {"t": round(self.clock.elapsed_s, 3), **values}
        try:
            self._files[name].write(json.dumps(_finite(line)) + "\n")
        except OSError as error:
            if not self._failed:
                print(f"aedit: {name}.jsonl: {error}; training goes on without it", flush=True)
            self._failed = True


def _open(path: Path) -> TextIO:
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    file = path.open("a", buffering=1, encoding="utf-8")
    if torn and path.stat().st_size:  # a crash in the middle of a line must not spoil the next one
        file.write("\n")
    return file


def _board(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("tensorboard = true needs the extra: pip install 'aedit[tensorboard]'") from error
    return SummaryWriter(directory / "tensorboard")


def _finite(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
