"""Processes of the benchmarks: hubs, programs that take their job as JSON, and runs in parallel."""

import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
from rich.console import Console
from rich.progress import track

from aedit.system import end_with_parent
from benchmarks.kit.netns import Place

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
STARTS_WITHIN_S, ENDS_WITHIN_S, ANSWERS_WITHIN_S = 120.0, 300.0, 600.0


def until(is_so: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Wait until `is_so()` is true. Raises TimeoutError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.05)


def start(module: str, *words: str, place: Place | None = None, **options: Any) -> "subprocess.Popen[str]":
    """Start `python -m module words` with one thread, inside the network namespace of `place`.

    It is told to end (SIGTERM) when the calling thread ends, however that ends. `ip netns exec` becomes the
    command itself, so that a signal reaches it. It keeps compiled modules, as an installed package does: to
    compile them anew takes three times as long as all else of a start.
    """
    inside = ["ip", "netns", "exec", place.namespace] if place else []
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [*inside, sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"},
        text=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        **options,
    )


def end(processes: "Iterable[subprocess.Popen[str]]") -> None:
    """Kill processes and wait for their end."""
    for process in processes:
        process.kill()
        process.wait(10)


def limit_files(pid: int, num_bytes: int = resource.RLIM_INFINITY) -> None:
    """Let no file of a process and of its children grow beyond this, as on a disk without room."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        limits = num_bytes, resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)  # first, as its children begin with its limits
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, limits)


def copy_folder(folder: Path, into: Path) -> None:
    """Copy the folder of processes that stand still, without their logs."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.log"))


def put_back(folder: Path, older: Path) -> None:
    """Put a copy in the place of the folder of processes that have ended; their logs stay."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log":
            path.unlink()
    shutil.copytree(older, folder, dirs_exist_ok=True)
    shutil.rmtree(older)


class Dialogue:
    """A program that answers lines with lines."""

    def __init__(self, process: "subprocess.Popen[str]", name: str) -> None:
        """Set up a dialogue with a process whose input and output are pipes; name: of it, in messages."""
        self.process, self.name = process, name

    @classmethod
    def start(cls, module: str, *words: str, place: Place | None = None, **options: Any) -> "Dialogue":
        """Start `python -m module words`, as `start` does."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return cls(start(module, *words, place=place, **pipes, **options), module)

    def say(self, line: str = "") -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read(self, limit_s: float = ANSWERS_WITHIN_S) -> str:
        """Return its next line. Raises TimeoutError after `limit_s`, and RuntimeError if it has ended."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(limit_s):
                raise TimeoutError(f"{self.name}: no answer within {limit_s:g} s")
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} has ended: its error is above")
        return line.rstrip("\n")

    def ask(self, line: str, limit_s: float = ANSWERS_WITHIN_S) -> Any:
        """Send a line and return the answer, which is JSON."""
        self.say(line)
        return json.loads(self.read(limit_s))

    def finish(self, limit_s: float) -> None:
        """Close its input and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(limit_s)

    def await_ready(self, limit_s: float = ANSWERS_WITHIN_S) -> None:
        """Wait for the line "ready". Raises RuntimeError if another one comes."""
        if (line := self.read(limit_s)) != "ready":
            raise RuntimeError(f"{self.name} did not become ready: {line!r}")


def start_hub(
    toml: Path, log: IO[Any], place: Place | None = None
) -> "tuple[subprocess.Popen[str], str, float]":
    """Start `aedit hub` beside its TOML and wait until it serves.

    Returns the process, its address and the seconds until it served. Raises RuntimeError with the end of the
    log.
    """
    told = toml.parent / "hub" / "address"
    told.unlink(missing_ok=True)
    words = ("hub", str(toml), f"--directory={toml.parent}/hub", "--insecure")
    began = time.monotonic()
    process = start("aedit.launch.cli", *words, place=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    while not (told.exists() and (address := told.read_text().strip())):
        if process.poll() is not None or time.monotonic() > began + STARTS_WITHIN_S:
            end([process])
            raise RuntimeError(f"the hub does not start:\n{Path(log.name).read_text()[-4000:]}")
        time.sleep(0.01)
    return process, address, time.monotonic() - began


@dataclass(frozen=True, slots=True)
class HubProcess:
    """A hub that serves."""

    address: str
    pid: int


def last_line(log: Path) -> str:
    """Return the last line of a log, for messages."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "its log is empty"


@contextmanager
def hub(directory: Path, toml: str, place: Place | None = None) -> Iterator[HubProcess]:
    """Run `aedit hub` with the configuration `toml`; it is gone afterwards."""
    file = directory / "run.toml"
    file.write_text(toml)
    with (directory / "hub.log").open("w") as log:
        process, address, _ = start_hub(file, log, place)
        try:
            yield HubProcess(address, process.pid)
        finally:
            end([process])


def run_jobs(
    module: str,
    jobs: Sequence[Any],
    *,
    places: Sequence[Place | None] = (),
    meanwhile: "Callable[[list[subprocess.Popen[str]]], None]" = lambda processes: None,
) -> list[dict[str, Any]]:
    """Run `python -m module JOB` for each job at once, and return the last line of each as JSON.

    jobs: dataclasses, sent as JSON. Each process prints "ready" and waits for a line, so that all begin
    together. meanwhile: called when they have begun. No process is left, whatever happens.
    """
    at = places or [None] * len(jobs)
    dialogues: list[Dialogue] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for job, place in zip(jobs, at, strict=True):
            dialogues.append(Dialogue.start(module, json.dumps(asdict(job)), place=place))
            processes.append(dialogues[-1].process)
        for dialogue in dialogues:
            dialogue.await_ready()
        for dialogue in dialogues:
            dialogue.say()
        meanwhile(processes)
        told = []
        for process in processes:
            out = process.communicate(timeout=ENDS_WITHIN_S)[0]
            if process.returncode:
                raise RuntimeError(f"{module} failed: its error is above")
            told.append(json.loads(out.splitlines()[-1]))
        return told
    finally:
        end(processes)


def _begin(parent: int) -> None:
    end_with_parent(parent, signal.SIGTERM)
    import torch  # not above: nodes without a model must start fast

    torch.set_num_threads(1)


def in_parallel(
    run: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int | None = None
) -> list[T]:
    """Return `run(*job)` for each job: one process per core with one thread each, and a progress bar."""
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),)) as pool:
        done = pool.map(run, *zip(*jobs, strict=True))
        return list(track(done, f"{len(jobs)} runs", len(jobs), console=Console(stderr=True)))
