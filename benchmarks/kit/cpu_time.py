"""CPU time of a program and of all processes that it starts, by role."""

import resource
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

import psutil

from benchmarks.kit.processes import ENDS_WITHIN_S

POLL_S = 0.2
ROLES = {
    "agent_main": "agent",
    "rewards.worker": "rewards",
    "trainer_process": "trainer of the drafter",
    "aedit.launch.node": "node",
    "metered_node": "node",
    "aedit.launch.hub": "hub",
}
"""Part of a command line, the first that fits; torchrun's holds that of the node."""


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of a program and of the processes that it started."""

    total_s: float
    wall_s: float
    by_role: dict[str, float]


class Descendants:
    """A program with the processes that it has started, and their CPU seconds. Not thread-safe."""

    def __init__(self, pid: int) -> None:
        self._top = psutil.Process(pid)
        self._seen: dict[psutil.Process, tuple[str, float]] = {}

    def look(self) -> dict[str, float]:
        """Return the CPU seconds so far by role; those of processes that have ended are of the last look."""
        below = []
        with suppress(psutil.Error):
            below = self._top.children(recursive=True)
        for one in (self._top, *below):
            with suppress(psutil.Error):  # one that has ended hides none of the others
                times = one.cpu_times()
                role = _role(one, self._top) or self._seen.get(one, ("torchrun", 0.0))[0]
                self._seen[one] = (role, times.user + times.system)
        found: defaultdict[str, float] = defaultdict(float)
        for role, seconds in self._seen.values():
            found[role] += seconds
        return dict(found)


def extra(few_and_many: "list[Spent]") -> float:
    """Return the CPU seconds that the longer of two runs took beyond the shorter one."""
    few, many = few_and_many
    return many.total_s - few.total_s


def spent(process: "subprocess.Popen[str]", limit_s: float = ENDS_WITHIN_S) -> Spent:
    """Wait for the end of a program and return what it took, its waited-for descendants included.

    Raises RuntimeError if it fails, and subprocess.TimeoutExpired after `limit_s`.
    """
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    found, over = Descendants(process.pid), threading.Event()
    by_role = found.look()

    def watch() -> None:
        nonlocal by_role
        while not over.wait(POLL_S):
            by_role = found.look()

    watcher = threading.Thread(target=watch, name="cpu times")
    watcher.start()
    try:
        code = process.wait(timeout=limit_s)
    finally:
        over.set()
        watcher.join()
        process.kill()
    if code:
        raise RuntimeError(f"exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(total, time.monotonic() - began, by_role)


def _role(process: psutil.Process, top: psutil.Process) -> str:
    """Return the role by the command line; "" for a process that has ended and is not waited for yet."""
    if process == top:
        return "launcher"
    words = " ".join(process.cmdline())
    if not words or "distributed.run" in words:
        return "torchrun" if words else ""
    return next((role for part, role in ROLES.items() if part in words), "torchrun")
