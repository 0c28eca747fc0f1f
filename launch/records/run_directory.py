"""Prepare the run directory, record the code that makes the run, and read how a start of it ended.

A prepared directory is writable, has free space, is in use by no other process and holds the same training.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aedit
from aedit.launch.config import RunConfig, continued, literal, load_run, to_toml, values
from aedit.system import exit_text, write_atomically
from aedit.types import RunFailed, UserError, name_fault

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
    "rl.keep_rollouts",
    "hub.view",
    "edit.prefetch",
    "edit.offload",
    "edit.timeout_s",
    "checkpoint.every",
    "checkpoint.keep",
    "alerts.intervals",
    "alerts.mismatch_kl",
    "alerts.disk_bytes",
    "alerts.webhook",
    "traces.endpoint",
    "traces.ratio",
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
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
LOG_LINES = 15
_ROOT = Path(aedit.__file__).parent
FAILED = "the run cannot go on: "
"""Begins the message of a `RunFailed`, where its line is written for the launcher."""


def prepare(config: RunConfig, joins_as: str = "") -> Path:
    """Create the run directory or continue it; return the file with the configuration of its nodes.

    Raises UserError if the directory cannot be written, is full, or belongs to another training.

    joins_as: the name of a single node that joins a run with a hub. It has its own file, as the directory may
    also be that of the hub, or of other nodes.
    """
    run_dir, remedy = Path(config.dir) / config.name, "--dir" if joins_as else "--name"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(run_dir).free
        if free_bytes < MIN_FREE_BYTES:
            need, have = MIN_FREE_BYTES // 2**20, free_bytes // 2**20
            raise UserError(
                f"{run_dir}: {have} MiB free, a run needs {need}; make room or choose another --dir"
            )
        run_toml = run_dir / "run.toml"
        if run_toml.exists():
            may_change = MAY_CHANGE | MAY_CHANGE_AT_A_HUB if joins_as else MAY_CHANGE
            config = config if joins_as else continued(config, run_toml)
            changed = differences(load_run(run_toml), config).items()
            listed = ", ".join(
                f"{name} ({was} -> {now})" for name, (was, now) in changed if name not in may_change
            )
            if listed and not _forgotten(run_dir):
                held = f"{run_dir}: holds a run with other values of {listed}"
                raise UserError(f"{held}; restore them, or choose another {remedy}")
        is_the_hubs = bool(joins_as) and any(run_dir.glob("hub*/part.json"))
        if not (is_the_hubs and run_toml.exists()):
            write_atomically(run_toml, to_toml(config))
        if joins_as:
            run_toml = run_dir / f"join_{joins_as}.toml"
            write_atomically(run_toml, to_toml(config))
        # The code that makes the run: one paragraph per version.
        newest, code = provenance(), run_dir / "code.txt"
        known = code.read_text(encoding="utf-8") if code.exists() else ""
        if not known.endswith(newest):
            write_atomically(code, f"{known}\n{newest}".lstrip("\n"))
    except OSError as error:
        message = f"{run_dir}: cannot be written: {error.strerror}; choose another --dir or --name"
        raise UserError(message) from None
    return run_toml


def next_attempt(run_dir: Path) -> int:
    """Return the number of this start in log names: one more than that of any `attempt_K.log`."""
    return 1 + max((attempt_of(log) for log in run_dir.glob("nodes/*/attempt_*.log")), default=0)


@contextlib.contextmanager
def claimed(run_dir: Path, node: int | str) -> Iterator[None]:
    """Lock the directory for this node until the block ends.

    node: its index, or its name if it joins a hub. Raises UserError if that is not a name, or if another
    process has locked it.
    """
    if isinstance(node, str) and (fault := name_fault(node)):
        raise UserError(f"--as: {fault}")
    path = run_dir / f".lock_{node}"
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
            if isinstance(node, str):
                raise UserError(
                    f"{run_dir}: node {node} is running already; choose another name with --as"
                ) from None
            raise UserError(
                f"{run_dir}: another aedit run is using it; stop that one or choose another --name"
            ) from None
        except OSError:
            pass  # some network file systems have no locks: a second run is then not detected
        yield


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[str, str]]:
    """Return both values of each key that differs, by dotted name, as TOML; `-` where a value is missing."""
    before, after = dict(values(old)), dict(values(new))
    names = [*before, *(name for name in after if name not in before)]
    changed = [n for n in names if n not in before or n not in after or before[n] != after[n]]
    return {
        name: (
            literal(before[name]) if name in before else "-",
            literal(after[name]) if name in after else "-",
        )
        for name in changed
    }


def _forgotten(run_dir: Path) -> bool:
    """Remove the files of a run that never took a step, so that its name can be used again.

    Return whether it was one. Nothing is removed while another process works in the directory.
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


def resting_file(folder: Path) -> Path:
    """Return the file that makes the replica in this folder rest while it is there."""
    return folder / "resting"


def provenance() -> str:
    """Return versions, digest of the sources, and git commit if there is one, as `key: value` lines."""
    facts = {"aedit": aedit.__version__, "sources": source_digest(), "commit": ""}
    if _git("ls-files", "__init__.py"):  # not for a `.venv` inside another repository
        facts["commit"] = _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    facts["python"] = platform.python_version()
    for name in LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return "".join(f"{name}: {value}\n" for name, value in facts.items() if value)


def source_digest() -> str:
    """Return SHA-256 over the names and contents of the package's `.py` and `.proto` files, 16 hex digits."""
    root = _ROOT
    digest = hashlib.sha256()
    # os.walk, as rglob does not follow the links of a checkout before Python 3.13.
    folders = os.walk(root, followlinks=True)
    paths = [Path(folder) / name for folder, _, names in folders for name in names]
    for path in sorted(path for path in paths if path.suffix in (".py", ".proto")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def failure_in(run_dir: Path, nodes: Sequence[int], ranks: int, attempt: int, output: str) -> str:
    """Return the node that failed in a start of a run, its exit code, and the end of its log.

    Args:
        run_dir: The run directory.
        nodes: Indices of the nodes that this machine started.
        ranks: Processes per node.
        attempt: Number of this start in log names.
        output: Of torchrun, with refusals of its workers, and what they wrote before they had a log.
    """
    found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", output)
    source, failed = run_dir / "launch.log", "torchrun failed"
    if found:
        code, rank = (int(number) for number in found[-1])
        if not nodes:
            return f"the node failed before it joined the run ({exit_text(code)})"
        node = nodes[rank // ranks]
        failed = f"node {node} failed ({exit_text(code)})"
        # The directory may also contain logs of earlier starts, and of other nodes.
        logs = {attempt_of(log): log for log in run_dir.glob(f"nodes/{node}/attempt_*.log")}
        if logs and max(logs) >= attempt:
            source = logs[max(logs)]
    lines: list[str] = []
    if source.exists():
        with source.open(encoding="utf-8", errors="replace") as file:
            lines = list(deque((line.rstrip() for line in file if line.strip()), maxlen=LOG_LINES))
    return "\n".join([f"{failed}; the end of {source}:", *lines])


def has_trained(run_dir: Path, nodes: Sequence[int]) -> bool:
    """Return whether any node took a step in its newest start; False if the budget was used up before."""
    for node in nodes:
        path = run_dir / "nodes" / str(node) / "events.jsonl"
        steps = {"start": 0, "stop": 0}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError):  # an incomplete line, left by a crash
                event = json.loads(line)
                if event.get("event") in steps:
                    steps[event["event"]] = event.get("step", 0)
        if steps["stop"] > steps["start"]:
            return True
    return False


def refusal_in(output: str) -> str:
    """Return the message of the first UserError or RunFailed of a node in the output of torchrun, or ""."""
    found = re.search(r"^aedit: (.+)\n", output, re.MULTILINE)
    return found[1] if found else ""


def error_of(message: str) -> Exception:
    """Return the error whose line has this message; see `refusal_in`."""
    return RunFailed(message) if message.startswith(FAILED) else UserError(message)


def indices_of(run_dir: Path, name: str) -> tuple[int, ...]:
    """Return the indices that a hub assigned to the node of this name, from the node directories.

    () if unknown.
    """
    named = (path.parent.name for path in run_dir.glob("nodes/*/name") if path.read_text() == name)
    return tuple(int(index) for index in named if index.isdecimal())


def attempt_of(log: Path) -> int:
    """Return K of `attempt_K.log`; 0 for any other file name."""
    number = log.stem.removeprefix("attempt_")
    return int(number) if number.isdecimal() else 0
