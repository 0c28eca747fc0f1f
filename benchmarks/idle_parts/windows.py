"""Measure a trainer's use of its node's waits and how fast it stops, from outside."""

import ctypes
import os
import queue
import random
import select
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.trainer_waits import Trainer

STOPS_WITHIN_S = 10.0
MESSAGE_WITHIN_S = 10.0
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True, slots=True)
class Harvest:
    """Result of one window, seconds."""

    idle_s: float
    cpu_s: float
    queued_s: float
    """Time in which the trainer was ready to run but had no core."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Times of one window that a message ended, in seconds since the message was sent."""

    left_s: float
    """Until the foreground was out of the window and could go on."""
    stopped_s: float
    """Until no thread of the trainer could run."""
    call_s: float
    """Part of `left_s` that leaving the window took."""
    cpu_s: float
    """Processor time of the trainer in the window."""


class Clocks:
    """Processor time and thread states of another process, as the kernel reports them."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
            raise ProcessLookupError(f"process {pid} has no clock")
        self._clock = clock.value

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    @property
    def queued_s(self) -> float:
        stats = [task.joinpath("schedstat") for task in self._tasks.iterdir()]
        return sum(1e-9 * int(stat.read_text().split()[1]) for stat in stats if stat.exists())

    def all_stopped(self) -> bool:
        stats = [task.joinpath("stat").read_text() for task in self._tasks.iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def priority(pid: int) -> tuple[str, str, str]:
    """Return a process's class, its session's priority, and whether the kernel schedules by session first."""
    classes = {os.SCHED_IDLE: "SCHED_IDLE", os.SCHED_OTHER: f"nice {os.getpriority(os.PRIO_PROCESS, pid)}"}
    session = Path(f"/proc/{pid}/autogroup")
    text = session.read_text().partition(" ")[2].strip() if session.exists() else ""
    by_session = AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1"
    scheduler = os.sched_getscheduler(pid)
    return (
        classes.get(scheduler, str(scheduler)),
        f"session {text or 'none'}",
        f"autogroup {'on' if by_session else 'off'}",
    )


def harvest(
    work: Trainer, step: Callable[[int], None], num_windows: int, windows_s: tuple[float, float]
) -> tuple[list[Harvest], float]:
    """Run windows of random length with a step after each.

    Returns their results, and the share of the trainer's processor time outside them.
    """
    clocks, chance = Clocks(work.status()["pid"]), random.Random(0)
    found, began_s = [], clocks.cpu_s
    for number in range(num_windows):
        with work.window("round"):
            opened_s, cpu_s, queued_s = time.perf_counter(), clocks.cpu_s, clocks.queued_s
            time.sleep(chance.uniform(*windows_s))
            idle_s, cpu_s = time.perf_counter() - opened_s, clocks.cpu_s - cpu_s
            found.append(Harvest(idle_s, cpu_s, clocks.queued_s - queued_s))
        step(number)
    inside_s, whole_s = sum(one.cpu_s for one in found), clocks.cpu_s - began_s
    return found, 1 - inside_s / whole_s if whole_s else 0.0


class Messenger:
    """Thread that sends a message at a given time, as a peer would. Also a context manager."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self._thread.start()

    def order(self, after_s: float) -> None:
        """Send a message in `after_s` seconds."""
        self._orders.put(after_s)

    def receive(self) -> float:
        """Wait for the message as on a socket; return when it was sent, by `time.perf_counter`."""
        if not select.select([self._read], [], [], MESSAGE_WITHIN_S)[0]:
            raise TimeoutError(f"no message came within {MESSAGE_WITHIN_S:g} s")
        (sent_s,) = struct.unpack("d", os.read(self._read, 8))
        return float(sent_s)

    def __enter__(self) -> "Messenger":
        return self

    def __exit__(self, *error: object) -> None:
        self._orders.put(None)
        self._thread.join(MESSAGE_WITHIN_S)
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while (after_s := self._orders.get()) is not None:
            time.sleep(after_s)
            os.write(self._write, struct.pack("d", time.perf_counter()))


def leave(work: Trainer, count: int, lengths_s: tuple[float, float]) -> list[Leaving]:
    """End windows by messages at random moments of a microbatch; return the times."""
    clocks, chance, found = Clocks(work.status()["pid"]), random.Random(1), []
    with Messenger() as messenger:
        for _ in range(count):
            before_s = clocks.cpu_s
            sent_s, left_s, call_s = _left(messenger, work.window("round"), chance.uniform(*lengths_s))
            stopped_s = _stopped(clocks) - sent_s
            found.append(Leaving(left_s - sent_s, stopped_s, call_s, clocks.cpu_s - before_s))
            time.sleep(0.002)
    return found


def leave_nothing(window: Callable[[], AbstractContextManager[None]], count: int) -> list[float]:
    """Return the seconds from a message to the foreground's next instruction, without a trainer."""
    chance, found = random.Random(1), []
    with Messenger() as messenger:
        for _ in range(count):
            sent_s, left_s, _ = _left(messenger, window(), chance.uniform(0.002, 0.05))
            found.append(left_s - sent_s)
    return found


def _left(
    messenger: Messenger, window: AbstractContextManager[None], after_s: float
) -> tuple[float, float, float]:
    """Return when the message was sent, when the window had been left, and how long leaving took."""
    messenger.order(after_s)
    with window:
        sent_s = messenger.receive()
        began_s = time.perf_counter()
    left_s = time.perf_counter()
    return sent_s, left_s, left_s - began_s


def _stopped(clocks: Clocks) -> float:
    give_up_s = time.perf_counter() + STOPS_WITHIN_S
    while not clocks.all_stopped():
        if time.perf_counter() > give_up_s:
            raise TimeoutError(f"the trainer could still run {STOPS_WITHIN_S:g} s after its window")
    return time.perf_counter()
