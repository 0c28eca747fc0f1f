"""A hub's folder: its lock, the files that describe the hub, and replay without a running hub."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aedit.async_sgd.hub import Hub
from aedit.async_sgd.journal import (
    File,
    Store,
    batches,
    check_gapless,
    check_payloads,
    segment_numbers,
    segment_path,
)
from aedit.async_sgd.rules import Accepted, HubPlan, Push, Record, Vector
from aedit.launch.config import (
    RunConfig,
    continued,
    load,
    load_run,
    to_toml,
    tokens_per_step,
    unit_rules,
    values,
)
from aedit.proto.codecs import codec
from aedit.system import read_line, write_if_changed
from aedit.types import UserError

_DECIDES = (
    "outer.",
    "edit.penalty.clip",
    "hub.merge",
    "hub.merge_cut",
    "hub.codec_down",
    "hub.weights",
    "hub.parent",
    "drafter.kind",
    "drafter.share",
    "name",
)
"""Keys on which the replay of the journal depends: other values would give other anchors."""
MIRROR = "mirror.json"
"""File with the term of the hub whose journal is in the folder; there is none in the folder of a leader."""


def noted_term(directory: Path) -> int:
    """Return the highest term whose leader was followed in this folder; 0 in the folder of a leader."""
    noted = read_line(directory / MIRROR)
    return int(json.loads(noted)["term"]) if noted else 0


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the folder for this process until the block ends; create it for its owner if it does not exist.

    The folder itself is locked, so that deleting a file does not release the lock. The file `lock` is
    locked too: it shows others that a hub runs, and it is the lock where a network file system cannot lock
    folders.

    Raises UserError if the folder cannot be created or another process has locked it.
    """
    with contextlib.ExitStack() as held:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            itself = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, itself)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            held.callback(os.close, lock)
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; choose another --directory") from error
        _lock(itself, directory, must=False)
        _lock(lock, directory, must=True)
        if not os.path.samestat(os.fstat(itself), os.stat(directory)):
            raise UserError(f"{directory} was replaced while the hub started: start it again")
        yield


def _lock(fd: int, directory: Path, *, must: bool) -> None:
    """Lock an open file or folder.

    Raises UserError if another process has locked it, and with `must` also if it cannot be locked.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{directory}: another hub is running in this folder; end it first, or choose another --directory"
        ) from None
    except OSError as error:
        if must:
            raise UserError(
                f"{directory}: its file system has no locks ({error.strerror}); choose another --directory"
            ) from error


def claim(directory: Path, config: RunConfig, part: tuple[int, int]) -> RunConfig:
    """Write the configuration and the part of this hub into its folder; return it as the run goes on with it.

    Raises UserError if the folder belongs to another part or run, or was written under other merge settings.
    """
    if (directory / "part.json").exists():
        _compare(directory, config, part)
        config = continued(config, directory / "run.toml")
    write_if_changed(directory / "run.toml", to_toml(config))
    write_if_changed(directory / "part.json", json.dumps(part))
    return config


def _compare(directory: Path, config: RunConfig, part: tuple[int, int]) -> None:
    k, n = json.loads((directory / "part.json").read_text())
    if (k, n) != part:
        raise UserError(
            f"--part: {directory} holds part {k}/{n}, not {part[0]}/{part[1]};"
            f" use --part {k}/{n} or another --directory"
        )
    before, now = dict(values(load_run(directory / "run.toml"))), dict(values(config))
    for name in sorted(before.keys() | now.keys()):
        if name.startswith(_DECIDES) and before.get(name) != now.get(name):
            raise UserError(
                f"{name} was {before.get(name)!r} and cannot become {now.get(name)!r} within a run:"
                f" restore the value, or start another run"
            )


def of_standby(number: int) -> str:
    """Return the name of the folder of standby `number`, counted from 1, in a run directory."""
    return "standby" if number == 1 else f"standby_{number}"


def actual_address(configured: str, directory: Path) -> str:
    """Return the address of the hub that is configured at HOST:PORT.

    With port 0 that is the address in the folder's `address` file, "" before the hub has written it.
    """
    return read_line(directory / "address") if configured.endswith(":0") else configured


def make_hub(config: RunConfig, part: tuple[int, int]) -> Hub:
    """Return a hub without any state."""
    plan = HubPlan(
        hub=config.hub,
        outer=config.outer,
        penalty=config.edit.penalty,
        every=config.edit.every,
        pace=config.edit.schedule,
        steps=config.train.steps,
        seconds=config.train.seconds,
        part=part,
        step_tokens=0 if config.hub.endless else tokens_per_step(config),
        leases=not config.hub.endless and not config.prompts.source,
        rules=unit_rules(config),
    )
    down = config.hub.codec_down
    return Hub(plan, None if down == "fp32" else codec(down))


def hub_of(directory: Path) -> Hub:
    """Return a hub without state, with the configuration in `directory`."""
    k, n = json.loads((directory / "part.json").read_text())
    return make_hub(load(directory / "run.toml", []).config, (k, n))


def replayed(directory: Path, *, from_the_beginning: bool = False) -> Hub:
    """Return the hub with the state of its folder, which is not changed.

    Raises UserError if the folder is damaged.

    from_the_beginning: replay all journal segments, which must still exist from the first one on, and read no
    snapshot.
    """
    hub = hub_of(directory)
    if from_the_beginning:
        check_gapless(directory, 1, segment_numbers(directory, "journal"))
        for batch in _journaled(directory, 1):
            for record in batch:
                hub.apply(record)
    else:
        Store(directory).read(hub)
    return hub


def anchors_of(directory: Path, *, from_the_beginning: bool = False) -> dict[int, Vector]:
    """Return the newest anchor of each unit as nodes receive it, by unit."""
    hub = replayed(directory, from_the_beginning=from_the_beginning)
    return {index: hub.anchor(index)[1] for index in hub.state.units}


def pushes_of(directory: Path) -> Iterator[Push]:
    """Yield all accepted pushes of the existing segments, in journal order."""
    yield from (record.push for record in records_of(directory) if isinstance(record, Accepted))


def records_of(directory: Path) -> Iterator[Record]:
    """Yield all records of the existing segments, in journal order."""
    first = min(segment_numbers(directory, "journal"), default=1)
    for batch in _journaled(directory, first):
        yield from batch


def _journaled(directory: Path, first: int) -> Iterator[list[Record]]:
    for number in segment_numbers(directory, "journal"):
        if number >= first:
            for batch, _ in batches(File(segment_path(directory, number))):
                check_payloads(batch)
                yield batch
