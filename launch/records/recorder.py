"""Write the records of a node: metrics about once a second, events as they happen.

Experiment trackers (`log = ["tensorboard", ...]`) receive the numbers too. Each node is one run of the
tracker, and all nodes of a run form a group. Each tracker has its own settings: `WANDB_MODE=offline` keeps
Weights & Biases on this machine, Trackio is local by default.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from aedit.types import UserError

LINE_EVERY_S = 1.0
PROJECT = "aedit"


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


class Sink(Protocol):
    """Receiver of numbers with their step. May raise: the recorder then continues without it."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Record `values`, all finite, as those of inner step `step` of the node."""

    def close(self) -> None:
        """Flush and close."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Run and node that the metrics belong to."""

    run: str
    node: int
    directory: Path
    """Directory of the node; trackers write their files below it."""

    @property
    def name(self) -> str:
        """Return the name of this node's run in a tracker."""
        return f"{self.run}-node-{self.node}"

    def identity(self) -> str:
        """Return a unique name, equal at each start of this node in this run directory."""
        path = self.directory / "sink_id"
        if not path.exists():
            path.write_text(f"{self.name}-{uuid.uuid4().hex[:8]}", encoding="utf-8")
        return path.read_text(encoding="utf-8")


class Recorder:
    """Writer of JSON lines in a node's directory; writes on the first rank of the node only.

    A full disk must not end the training: lines that cannot be written are skipped, with one message.
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
        self._track(numbers_of(values))

    def event(self, event: str, **values: Any) -> None:
        """Write one event."""
        self._write("events", {"event": event, **values})
        if event == "eval":
            self._track(numbers_of({"held_out_loss": values["loss"], "step": values["step"]}))
        if event == "rl_eval":
            self._track(numbers_of({"step": values["step"], "held_out": values}))

    def close(self) -> None:
        """Close the files and the sinks."""
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                print(f"aedit: {type(sink).__name__}: {error}", flush=True)

    def _track(self, values: dict[str, float]) -> None:
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


class TensorBoard:
    """Writer of event files in the node's `tensorboard` directory."""

    def __init__(self, origin: Origin) -> None:
        """Open a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(origin.directory / "tensorboard")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add one scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandB:
    """Client of Weights & Biases, configured by its environment variables.

    `WANDB_MODE`, `WANDB_PROJECT`, ...
    """

    def __init__(self, origin: Origin) -> None:
        """Begin the run of this node in Weights & Biases, or continue it."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=origin.name,
            group=origin.run,
            id=origin.identity(),
            resume="allow",
            dir=origin.directory,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own step must increase, but a node that resumes repeats some steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Log one entry."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run; data that could not be sent remain in the node's directory."""
        self._run.finish()


class Trackio:
    """Client of Trackio, on this machine unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set."""

    def __init__(self, origin: Origin) -> None:
        """Begin the run of this node in Trackio, or continue it."""
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=origin.identity(),
            group=origin.run,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Log one entry."""
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


SINKS: Mapping[str, Callable[[Origin], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}
"""Per name in `log`; the extra that installs it has the same name."""


def open_sinks(names: Sequence[str], origin: Origin) -> list[Sink]:
    """Return the sinks that `log` names.

    Raises UserError if the package of one is not installed or fails to start.

    Args:
        names: Keys of `SINKS`.
        origin: Run and node that the metrics belong to; its directory exists.
    """
    opened: list[Sink] = []
    for name in names:
        try:
            opened.append(SINKS[name](origin))
        except ImportError as error:
            raise UserError(f"log: \"{name}\" needs its extra: pip install 'aedit[{name}]'") from error
        except Exception as error:  # the type depends on the tracker: no login, no network, ...
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f'log: "{name}" cannot start: {reason}') from error
    return opened


def numbers_of(values: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers among `values`, the only values that a tracker draws.

    Those of an object in it are named `OBJECT/NAME`, as trackers group them.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
    return found
