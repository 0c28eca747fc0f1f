"""A hub's folder: one process at a time, one configuration, and where the hub can be found."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import to_toml, values
from aedit.launch.config.load import load
from aedit.system import write_atomically
from aedit.types import UserError

_DECIDES = ("outer.", "edit.penalty.clip", "hub.merge", "hub.codec_down", "hub.weights", "hub.parent", "name")
"""What the journal's records mean: replayed under other values they would give other anchors."""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """The folder, for this process alone; it is made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; choose another --directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(f"another hub works in {directory}: end it first") from None
    try:
        yield
    finally:
        os.close(lock)


def claim(directory: Path, config: RunConfig, part: tuple[int, int]) -> None:
    """Write down what run this is. UserError if the folder is another's, or was written under other rules."""
    if (directory / "part.json").exists():
        _compare(directory, config, part)
    write_atomically(directory / "run.toml", to_toml(config))
    write_atomically(directory / "part.json", json.dumps(part))


def _compare(directory: Path, config: RunConfig, part: tuple[int, int]) -> None:
    k, n = json.loads((directory / "part.json").read_text())
    if (k, n) != part:
        raise UserError(f"{directory} is of part {k}/{n}: --part must be that, or --directory another")
    before, now = dict(values(load(directory / "run.toml", []).config)), dict(values(config))
    for name in sorted(before.keys() | now.keys()):
        if name.startswith(_DECIDES) and before.get(name) != now.get(name):
            raise UserError(
                f"{name} was {before.get(name)!r} and cannot become {now.get(name)!r} within a run:"
                f" set it back, or begin another run"
            )


def read_line(path: Path) -> str:
    """Empty if there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def found_at(configured: str, directory: Path) -> str:
    """Where a hub is that is configured to be at HOST:PORT: with port 0 the one that it has taken, as its
    folder says; empty if that is not known yet."""
    return read_line(directory / "address") if configured.endswith(":0") else configured
