"""Checkpoints of one node, sharded over its ranks and renamed into place when complete.

nodes/N/checkpoints/round_000012/ holds the files of torch.distributed.checkpoint, and meta.json, which is
written last. A directory with any other name is not a checkpoint. Names end in _1, _2, ... if a node stops
several times in one round.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from aedit.edit import Shards
from aedit.system import sync_directory
from aedit.types import UserError

_NAME = re.compile(r"round_(\d{6,})(?:_(\d+))?$")
_SUBS = 1000


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Identity of a checkpoint, equal on all nodes for one state of the run."""

    round: int
    sub: int = 0
    """Number of stops in this round so far; 0 for the checkpoint at its end."""

    @property
    def name(self) -> str:
        """Return the name of the directory."""
        return f"round_{self.round:06d}" + (f"_{self.sub}" if self.sub else "")

    @property
    def number(self) -> int:
        """Return one integer, in the order of marks, to compare them over the network."""
        return self.round * _SUBS + self.sub

    @classmethod
    def of(cls, number: int) -> "Mark":
        """Return the mark of an integer from `number`."""
        return cls(*divmod(number, _SUBS))


class NodeCheckpoints:
    """Directory of the checkpoints of one node."""

    def __init__(self, directory: Path, *, keep: int, shards: Shards) -> None:
        self.directory = directory
        self.keep = keep
        self.shards = shards

    def marks(self) -> list[Mark]:
        """Return the marks of the complete checkpoints, oldest first."""
        found = []
        for path in self.directory.glob("round_*") if self.directory.is_dir() else ():
            if (match := _NAME.fullmatch(path.name)) and (path / "meta.json").is_file():
                found.append(Mark(int(match[1]), int(match[2] or 0)))
        return sorted(found)

    def path(self, mark: Mark) -> Path:
        """Return the directory of a checkpoint."""
        return self.directory / mark.name

    def save(self, mark: Mark, state: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        """Write a checkpoint; return its bytes. All ranks of the node together.

        Raises OSError if it cannot be written; the older ones are then intact.
        """
        writing = self.directory / f".writing-{mark.name}"
        try:
            self._lead(lambda: _make_empty(writing))
            self._write(state, writing)
            self._lead(lambda: self._complete(mark, writing, meta))
        except dcp.CheckpointException as error:
            raise OSError(f"checkpoint {mark.name}: {_reason(error)}") from error
        finally:
            if self.shards.leads:
                shutil.rmtree(writing, ignore_errors=True)
        return sum(file.stat().st_size for file in self.path(mark).iterdir()) if self.shards.leads else 0

    def load(self, mark: Mark, into: dict[str, Any]) -> None:
        """Read a checkpoint into tensors with this node's sharding, in place.

        All ranks of the node together.
        """
        try:
            dcp.load(
                into,
                storage_reader=dcp.FileSystemReader(self.path(mark)),
                process_group=self.shards.group,
                no_dist=self.shards.size == 1,
            )
        except (dcp.CheckpointException, RuntimeError, ValueError, OSError, EOFError) as error:
            raise UserError(
                f"{self.path(mark)} cannot be read ({_reason(error)}); remove it to resume from an older one"
            ) from error

    def meta(self, mark: Mark) -> dict[str, Any]:
        """Return the contents of the checkpoint's meta.json."""
        return read_meta(self.path(mark))

    def drop_after(self, mark: Mark | None) -> None:
        """Remove the checkpoints after `mark`, which a resume from it invalidates."""
        for other in self.marks() if self.shards.leads else ():
            if mark is not None and other > mark:
                shutil.rmtree(self.path(other))

    def _write(self, state: Mapping[str, Any], writing: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank needs none
            dcp.save(
                dict(state),
                storage_writer=dcp.FileSystemWriter(writing, sync_files=True),
                process_group=self.shards.group,
                no_dist=self.shards.size == 1,
            )

    def _lead(self, act: Callable[[], None]) -> None:
        """Call `act` on the first rank; raise on all ranks if it fails, so that none waits for another."""
        failure: OSError | None = None
        if self.shards.leads:
            try:
                act()
            except OSError as error:
                failure = error
        if not self.shards.decide([failure is None])[0]:
            raise failure or OSError("the node's first rank could not write")

    def _complete(self, mark: Mark, writing: Path, meta: Mapping[str, Any]) -> None:
        _write_whole(writing / "meta.json", json.dumps(meta, indent=1))
        shutil.rmtree(self.path(mark), ignore_errors=True)  # left from before a resume at an older checkpoint
        os.rename(writing, self.path(mark))
        sync_directory(self.directory)
        self._prune()

    def _prune(self) -> None:
        for mark in self.marks()[: -self.keep]:
            shutil.rmtree(self.path(mark), ignore_errors=True)
        for left in self.directory.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the meta.json of the checkpoint at `path`."""
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}/meta.json cannot be read ({error}); remove {path} to resume from an older one"
        ) from error
    return meta


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write_whole(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException) and error.failures:
        first = next(iter(error.failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
