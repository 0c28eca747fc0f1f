"""Experiment trackers that receive a node's metrics beside its own files: `log = ["tensorboard", ...]`.

Each node is one run of the tracker, and all nodes of one run form a group. Each tracker has its own settings:
`WANDB_MODE=offline` keeps Weights & Biases on this machine, Trackio is local by default.
"""

import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aedit.types import UserError

PROJECT = "aedit"


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
