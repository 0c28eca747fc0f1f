"""A real hub for `benchmarks.hub`, `aedit hub` in a process of its own, and the processes of its nodes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hub_parts.member import RUN, Crew, Seen

ROOT = Path(__file__).parents[2]
STARTS_WITHIN_S, ENDS_WITHIN_S = 120.0, 300.0

TOML = """
name = "{run}"
dir = "{directory}"
[train]
steps = 1000000000
[edit]
every = 64
landing = "arrival"
[hub]
address = "127.0.0.1:0"
{settings}
"""


@dataclass(frozen=True, slots=True)
class HubProcess:
    """Where it listens, and who it is."""

    address: str
    pid: int

    def memory_bytes(self, name: str) -> int:
        """`VmHWM`, the most it has ever had, `RssAnon`, or another of the lines in its status file."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def hub_process(settings: str) -> Iterator[HubProcess]:
    """Start a hub with an empty journal; it is gone afterwards. settings: what `[hub]` has besides, and the
    tables after it. RuntimeError with the end of its log if it does not start."""
    with TemporaryDirectory(prefix="aedit-") as name:
        directory = Path(name)
        toml = directory / "run.toml"
        toml.write_text(TOML.format(run=RUN, directory=directory, settings=settings))
        words = [sys.executable, "-m", "aedit.launch.cli", "hub", str(toml), f"--directory={directory}/hub"]
        with (directory / "hub.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                yield HubProcess(_address(process, directory), process.pid)
            finally:
                process.kill()
                process.wait(10)


def _address(process: "subprocess.Popen[bytes]", directory: Path) -> str:
    file, give_up_s = directory / "hub" / "address", time.monotonic() + STARTS_WITHIN_S
    while not (file.exists() and (address := file.read_text().strip())):
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise RuntimeError(f"the hub does not start:\n{(directory / 'hub.log').read_text()[-4000:]}")
        time.sleep(0.05)
    return address


def walk_together(crews: Sequence[Crew]) -> list[Seen]:
    """Let all crews begin at one moment, each in a process of its own; none is left, whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for crew in crews:
            words = [sys.executable, "-m", "benchmarks.hub_parts.member", json.dumps(asdict(crew))]
            processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
                )
            )
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a node could not join: its error is above")
        told = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            told.append(process.communicate(timeout=ENDS_WITHIN_S)[0])
            if process.returncode:
                raise RuntimeError("a node has failed: its error is above")
        return [Seen(**json.loads(text)) for text in told]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
