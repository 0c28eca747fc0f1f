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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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


@dataclass(frozen=True, slots=True)
class Tracker:
    """Experiment tracker. Its calls may raise: the recorder then continues without it."""

    name: str
    add: Callable[[Mapping[str, float], int], object]
    """Records finite values as those of an inner step of the node."""

    close: Callable[[], object]
    """Flushes and closes."""


class Recorder:
    """Writer of JSON lines in a node's directory; writes on the first rank of the node only.

    A full disk must not end the training: lines that cannot be written are skipped, with one message.
    """

    def __init__(
        self, directory: Path, clock: Clock, *, writes: bool, trackers: Callable[[], list[Tracker]] = list
    ) -> None:
        """Open the files of a node.

        Args:
            directory: Of the node; created if it does not exist.
            clock: Gives each line its time.
            writes: Whether this rank writes.
            trackers: Opens the trackers that receive the numbers too; called on the rank that writes.
        """
        self.directory = directory
        self.clock = clock
        self._files: dict[str, TextIO] = {}
        self._line_at = -LINE_EVERY_S
        self._failed = False
        self._trackers: list[Tracker] = []
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(directory / f"{name}.jsonl") for name in ("metrics", "events")}
            self._trackers = trackers()

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
        if event in ("alert", "alert_over"):
            now = float(event == "alert")
            self._track(numbers_of({f"alert/{values['kind']}": now, "step": values.get("step", 0)}))
        if event == "rl_eval":
            self._track(numbers_of({"step": values["step"], "held_out": values}))

    def close(self) -> None:
        """Close the files and the trackers."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk, see `_write`
                file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                print(f"aedit: {tracker.name}: {error}", flush=True)

    def _track(self, values: dict[str, float]) -> None:
        """Pass numbers to the trackers. One that fails is dropped: training does not depend on it."""
        step = int(values.get("step", 0))
        for tracker in list(self._trackers):
            try:
                tracker.add(values, step)
            except Exception as error:
                print(f"aedit: {tracker.name}: {error}; training continues without it", flush=True)
                self._trackers.remove(tracker)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if name not in self._files:
            return
        line = {"t": round(self.clock.elapsed_s, 3), **values}
        try:
            self._files[name].write(json.dumps(_finite(line)) + "\n")
        except OSError as error:
            failed, self._failed = self._failed, True
            if not failed:
                with suppress(OSError):  # standard output may be on that disk
                    print(f"aedit: {name}.jsonl: {error}; training continues without it", flush=True)


def _open(path: Path) -> TextIO:
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    file = path.open("a", buffering=1, encoding="utf-8")
    if torn and path.stat().st_size:  # a line left incomplete by a crash must not corrupt the next one
        with suppress(OSError):
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


def _tensorboard(run: str, node: int, directory: Path) -> Tracker:
    """Return a writer of event files in the node's `tensorboard` directory."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(directory / "tensorboard")

    def add(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker("TensorBoard", add, writer.close)


def _wandb(run: str, node: int, directory: Path) -> Tracker:
    """Return a client of Weights & Biases, configured by `WANDB_MODE`, `WANDB_PROJECT`, ...

    Data that could not be sent remain in the node's directory.
    """
    import wandb

    begun = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=f"{run}-node-{node}",
        group=run,
        id=_lasting_name(run, node, directory),
        resume="allow",
        dir=directory,
        settings=wandb.Settings(console="off", silent=True),
    )
    # Its own step must increase, but a node that resumes repeats some steps.
    begun.define_metric("step")
    begun.define_metric("*", step_metric="step")
    return Tracker("WandB", lambda values, step: begun.log({**values, "step": step}), begun.finish)


def _trackio(run: str, node: int, directory: Path) -> Tracker:
    """Return a client of Trackio: local unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set."""
    import trackio

    begun: Any = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=_lasting_name(run, node, directory),
        group=run,
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )

    def add(values: Mapping[str, float], step: int) -> None:
        begun.log({name: value for name, value in values.items() if name != "step"}, step=step)

    return Tracker("Trackio", add, begun.finish)


def _lasting_name(run: str, node: int, directory: Path) -> str:
    """Return a unique name, equal at each start of this node in this run directory."""
    path = directory / "sink_id"
    if not path.exists():
        path.write_text(f"{run}-node-{node}-{uuid.uuid4().hex[:8]}", encoding="utf-8")
    return path.read_text(encoding="utf-8")


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""Per name in `log`; the extra that installs it has the same name."""


def open_trackers(names: Sequence[str], run: str, node: int, directory: Path) -> list[Tracker]:
    """Return the trackers that `log` names. All nodes of a run form a group of the tracker.

    Raises UserError if the package of one is not installed or fails to start.

    Args:
        names: Keys of `TRACKERS`.
        run: Name of the run.
        node: Index of the node.
        directory: Of the node, which exists; trackers write their files below it.
    """
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(TRACKERS[name](run, node, directory))
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
