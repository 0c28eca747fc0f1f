"""The run directory before the run: writable, roomy, used by nobody else, and of the same training."""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import literal, to_toml, values
from aedit.launch.config.load import load
from aedit.launch.rundir.ending import attempt_of
from aedit.launch.rundir.provenance import provenance
from aedit.system import write_atomically
from aedit.types import UserError

MIN_FREE_BYTES = 256 * 2**20
"""Room for logs and a small model's checkpoints; the node itself tells of one that does not fit."""

MAY_CHANGE = {
    "name",
    "dir",
    "device",
    "restarts",
    "log",
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

PARTS = ("nodes", "hub", "hub_*", "standby")
"""Folders of what nodes and hubs have learned."""

STEPPED = re.compile(r'"steps?": ?[1-9]')
"""In a line of metrics or an event: a step was taken."""

MAY_CHANGE_AT_A_HUB = {"hub.address", "hub.standby"}
"""What a node that joins may have anew besides: its hub may be at another place by now."""


def prepare(config: RunConfig, joins_as: str = "") -> Path:
    """Make the run directory, or take it up again; return the file with the configuration of its nodes.

    joins_as: the name of the one node that joins a run led by a hub. It has a file of its own, as the
    directory may also be that of the hub, or of other nodes. Raises UserError if the directory cannot be
    written, is full, or holds another training.
    """
    run_dir, remedy = Path(config.dir) / config.name, "--dir" if joins_as else "--name"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _check_space(run_dir)
        run_toml = run_dir / "run.toml"
        if run_toml.exists():
            may_change = MAY_CHANGE | MAY_CHANGE_AT_A_HUB if joins_as else MAY_CHANGE
            listed = _changed(load(run_toml, []).config, config, may_change)
            if listed and not _forgotten(run_dir):
                held = f"{run_dir} holds a run with other values of {listed}"
                raise UserError(f"{held}; choose another {remedy}")
        is_the_hubs = bool(joins_as) and any(run_dir.glob("hub*/part.json"))
        if not (is_the_hubs and run_toml.exists()):
            write_atomically(run_toml, to_toml(config))
        if joins_as:
            run_toml = run_dir / f"join_{file_name(joins_as)}.toml"
            write_atomically(run_toml, to_toml(config))
        _note_code(run_dir / "code.txt")
    except OSError as error:
        message = f"{run_dir}: cannot be written: {error.strerror}; choose another --dir or --name"
        raise UserError(message) from None
    return run_toml


def file_name(node: str) -> str:
    """Return the name of a node as a part of a file's name."""
    return re.sub(r"[^\w.-]", "_", node)


def next_attempt(run_dir: Path) -> int:
    """The number this start's logs bear: one above every `attempt_K.log` there is."""
    return 1 + max((attempt_of(log) for log in run_dir.glob("nodes/*/attempt_*.log")), default=0)


@contextlib.contextmanager
def claimed(run_dir: Path, node: int | str) -> Iterator[None]:
    """Hold the directory for this node while the block runs.

    node: its number, or its name if it joins a hub. Raises UserError if another process holds it.
    """
    path = run_dir / f".lock_{node if isinstance(node, int) else file_name(node)}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        message = f"{run_dir}: cannot be written: {error.strerror}; choose another --dir or --name"
        raise UserError(message) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(_in_use(run_dir, node)) from None
        except OSError:
            pass  # some network file systems have no locks: then nobody is warned of a second run
        yield


def _in_use(run_dir: Path, node: int | str) -> str:
    if isinstance(node, str):
        return f"{run_dir}: node {node} is running already; choose another name with --as"
    return f"{run_dir}: another aedit run is using it; stop that one or choose another --name"


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[str, str]]:
    """What differs, by dotted name: the two values as TOML writes them, `-` where there is none."""
    before, after = dict(values(old)), dict(values(new))
    names = [*before, *(name for name in after if name not in before)]
    changed = [n for n in names if n not in before or n not in after or before[n] != after[n]]
    return {name: (_shown(before, name), _shown(after, name)) for name in changed}


def _shown(entries: dict[str, object], name: str) -> str:
    return literal(entries[name]) if name in entries else "-"


def _forgotten(run_dir: Path) -> bool:
    """Remove what is left of a run that never took a step, so that it does not block its name.

    Returns whether it was such a run. Nothing is removed while another process works in the directory.
    """
    parts = [path for name in PARTS for path in run_dir.glob(name)]
    lines = (path for part in parts for path in part.rglob("*.jsonl"))
    stepped = any(STEPPED.search(path.read_text(encoding="utf-8", errors="replace")) for path in lines)
    nodes = sum(map(_is_locked, run_dir.glob(".lock_*")))  # one of them is this command's own
    if stepped or nodes > 1 or any(_is_locked(path) for part in parts for path in part.glob("lock")):
        return False
    for part in parts:
        shutil.rmtree(part)
    return True


def _is_locked(path: Path) -> bool:
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a file system without locks
    return False


def _changed(old: RunConfig, new: RunConfig, may_change: set[str]) -> str:
    """Return the values that differ though they may not, as one text."""
    changed = {name: pair for name, pair in differences(old, new).items() if name not in may_change}
    return ", ".join(f"{name} ({was} -> {now})" for name, (was, now) in changed.items())


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
