"""Prepare the run directory.

Writable, with free space, in use by no other process, and of the same training.
"""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from aedit.launch.config import RunConfig, continued, literal, load_run, to_toml, values
from aedit.launch.records.ending import attempt_of
from aedit.launch.records.provenance import provenance
from aedit.system import write_atomically
from aedit.types import UserError

MIN_FREE_BYTES = 256 * 2**20
"""Space for logs and a small model's checkpoints; the node reports a checkpoint that does not fit."""

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
"""Keys that may differ in a resumed run: its length, speed and hardware, but not the training itself."""

PARTS = ("nodes", "votes", "hub", "hub_*", "standby", "standby_*", "peers")
"""Folders with the state of nodes, hubs and peers."""

STEPPED = re.compile(r'"steps?": ?[1-9]')
"""Matches a line of metrics or an event after at least one step."""

MAY_CHANGE_AT_A_HUB = {
    *("hub.address", "hub.standby"),
    *("swarm.peers", "swarm.listen", "swarm.announce", "swarm.allow"),
}
"""Further keys that may differ in a node that joins: its hub may have moved."""


def prepare(config: RunConfig, joins_as: str = "") -> Path:
    """Create the run directory or continue it; return the file with the configuration of its nodes.

    Raises UserError if the directory cannot be written, is full, or belongs to another training.

    joins_as: the name of a single node that joins a run with a hub. It has its own file, as the directory may
    also be that of the hub, or of other nodes.
    """
    run_dir, remedy = Path(config.dir) / config.name, "--dir" if joins_as else "--name"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _check_space(run_dir)
        run_toml = run_dir / "run.toml"
        if run_toml.exists():
            may_change = MAY_CHANGE | MAY_CHANGE_AT_A_HUB if joins_as else MAY_CHANGE
            config = config if joins_as else continued(config, run_toml)
            listed = _changed(load_run(run_toml), config, may_change)
            if listed and not _forgotten(run_dir):
                held = f"{run_dir}: holds a run with other values of {listed}"
                raise UserError(f"{held}; restore them, or choose another {remedy}")
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
    """Return the name of a node as a part of a file name."""
    return re.sub(r"[^\w.-]|^\.+$", "_", node)


def next_attempt(run_dir: Path) -> int:
    """Return the number of this start in log names: one more than that of any `attempt_K.log`."""
    return 1 + max((attempt_of(log) for log in run_dir.glob("nodes/*/attempt_*.log")), default=0)


@contextlib.contextmanager
def claimed(run_dir: Path, node: int | str) -> Iterator[None]:
    """Lock the directory for this node until the block ends.

    node: its index, or its name if it joins a hub. Raises UserError if another process has locked it.
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
            pass  # some network file systems have no locks: a second run is then not detected
        yield


def _in_use(run_dir: Path, node: int | str) -> str:
    if isinstance(node, str):
        return f"{run_dir}: node {node} is running already; choose another name with --as"
    return f"{run_dir}: another aedit run is using it; stop that one or choose another --name"


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[str, str]]:
    """Return both values of each key that differs, by dotted name, as TOML; `-` where a value is missing."""
    before, after = dict(values(old)), dict(values(new))
    names = [*before, *(name for name in after if name not in before)]
    changed = [n for n in names if n not in before or n not in after or before[n] != after[n]]
    return {name: (_shown(before, name), _shown(after, name)) for name in changed}


def _shown(entries: dict[str, object], name: str) -> str:
    return literal(entries[name]) if name in entries else "-"


def _forgotten(run_dir: Path) -> bool:
    """Remove the files of a run that never took a step, so that its name can be used again.

    Return whether it was one.

    Nothing is removed while another process works in the directory.
    """
    parts = [path for name in PARTS for path in run_dir.glob(name)]
    lines = (path for part in parts for path in part.rglob("*.jsonl"))
    stepped = any(STEPPED.search(path.read_text(encoding="utf-8", errors="replace")) for path in lines)
    nodes = sum(map(_is_locked, run_dir.glob(".lock_*")))  # including the lock of this command
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
    """Return the differences in keys that may not change, as one text."""
    changed = {name: pair for name, pair in differences(old, new).items() if name not in may_change}
    return ", ".join(f"{name} ({was} -> {now})" for name, (was, now) in changed.items())


def _check_space(run_dir: Path) -> None:
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes < MIN_FREE_BYTES:
        need, have = MIN_FREE_BYTES // 2**20, free_bytes // 2**20
        raise UserError(f"{run_dir}: {have} MiB free, a run needs {need}; make room or choose another --dir")


def _note_code(path: Path) -> None:
    """Append the code version to the file if it differs from the last one; one paragraph per version."""
    newest = provenance()
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if not known.endswith(newest):
        write_atomically(path, f"{known}\n{newest}".lstrip("\n"))
