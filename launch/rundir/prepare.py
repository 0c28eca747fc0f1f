"""The run directory before the run: writable, roomy, used by nobody else, and of the same training."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import literal, to_toml, values
from aedit.launch.config.load import load
from aedit.launch.rundir.ending import attempt_of
from aedit.launch.rundir.provenance import provenance
from aedit.types import UserError

MIN_FREE_BYTES = 256 * 2**20
"""Room for logs and a small model's checkpoints; the node itself tells of one that does not fit."""

MAY_CHANGE = {
    "name",
    "dir",
    "device",
    "restarts",
    "tensorboard",
    "model.activation_checkpointing",
    "model.compile",
    "train.steps",
    "train.seconds",
    "train.eval_every",
    "train.eval_samples",
    "edit.prefetch",
    "edit.offload",
    "edit.timeout_s",
    "checkpoint.every",
    "checkpoint.keep",
    "local.slowdown",
    "local.ranks",
}
"""Values a resumed run may have anew: how long, how fast and on what it trains, not what."""


def prepare(config: RunConfig) -> Path:
    """Make the run directory, or take it up again, and write `run.toml` and `code.txt`; else UserError."""
    run_dir = Path(config.dir) / config.name
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _check_space(run_dir)
        run_toml = run_dir / "run.toml"
        if run_toml.exists():
            _check_same_training(load(run_toml, []).config, config, run_dir)
        write_atomically(run_toml, to_toml(config))
        _note_code(run_dir / "code.txt")
    except OSError as error:
        message = f"{run_dir}: cannot be written: {error.strerror}; choose another --dir or --name"
        raise UserError(message) from None
    return run_dir


def next_attempt(run_dir: Path) -> int:
    """The number this start's logs bear: one above every `attempt_K.log` there is."""
    return 1 + max((attempt_of(log) for log in run_dir.glob("nodes/*/attempt_*.log")), default=0)


@contextlib.contextmanager
def claimed(run_dir: Path, node: int) -> Iterator[None]:
    """Hold the directory for this node while the block runs; UserError if another `aedit run` holds it."""
    with (run_dir / f".lock_{node}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{run_dir}: another aedit run is using it; stop that one or choose another --name"
            raise UserError(message) from None
        except OSError:
            pass  # some network file systems have no locks: then nobody is warned of a second run
        yield


def write_atomically(path: Path, text: str) -> None:
    """Whole and on disk, or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[str, str]]:
    """What differs, by dotted name: the two values as TOML writes them, `-` where there is none."""
    before, after = dict(values(old)), dict(values(new))
    names = [*before, *(name for name in after if name not in before)]
    changed = [n for n in names if n not in before or n not in after or before[n] != after[n]]
    return {name: (_shown(before, name), _shown(after, name)) for name in changed}


def _shown(entries: dict[str, object], name: str) -> str:
    return literal(entries[name]) if name in entries else "-"


def _check_same_training(old: RunConfig, new: RunConfig, run_dir: Path) -> None:
    changed = {name: pair for name, pair in differences(old, new).items() if name not in MAY_CHANGE}
    if changed:
        listed = ", ".join(f"{name} ({was} -> {now})" for name, (was, now) in changed.items())
        raise UserError(f"{run_dir} holds a run with other values of {listed}; choose another --name")


def _check_space(run_dir: Path) -> None:
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes < MIN_FREE_BYTES:
        need, have = MIN_FREE_BYTES // 2**20, free_bytes // 2**20
        raise UserError(f"{run_dir}: {have} MiB free, a run needs {need}; make room or choose another --dir")


def _note_code(path: Path) -> None:
    """One paragraph per code that worked on this run, the newest last."""
    newest = provenance()
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if not known.endswith(newest):
        write_atomically(path, f"{known}\n{newest}".lstrip("\n"))
