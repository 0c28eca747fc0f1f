"""A process that runs only while it is let: it is born stopped, and stopped and continued from outside.

SIGSTOP needs no answer: the kernel takes the process off its core at the next interrupt, whatever it is
doing, and everything it has stays where it is. Whoever was in the middle of a microbatch finishes it after
the next SIGCONT.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be started."""

    module: str
    """Its `main` begins with `born`."""
    work: bytes
    """What `born` returns, by `packed`."""
    fds: tuple[int, ...] = ()
    niceness: int = 19
    log: Path | None = None
    """Where its standard output and errors go; nowhere by default."""


class HeldProcess:
    """A child that stops itself as soon as it is born. Start it in a thread that lasts: the kernel ends it
    together with that thread.

    Not for several threads at once: `let`, `hold` and `exit_code` belong under one lock of the caller's, so
    that no signal goes to a process that has been buried.
    """

    def __init__(self, order: Order) -> None:
        self._process = _spawn(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_born(self) -> bool:
        """Whether it has stopped itself for the first time, or has ended: a tenth of a second after its
        start. Leave it alone until then: one that is stopped before it is bound to us would outlive us."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def is_starved(self, cpu_s: float) -> bool:
        """Whether it would run, but has not even had so much processor time in its life."""
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_RUNNING and sum(process.cpu_times()[:2]) < cpu_s
        except psutil.NoSuchProcess:
            return False

    def let(self) -> None:
        """Go on. Returns at once."""
        self._signal(signal.SIGCONT)

    def hold(self) -> None:
        """Stop. Returns at once; the process is off its core a moment later."""
        self._signal(signal.SIGSTOP)

    def exit_code(self) -> int | None:
        """None: it lives. -9: killed."""
        return self._process.poll()

    def kill(self) -> None:
        """End it, stopped or not, and wait until it is gone. Raises subprocess.TimeoutExpired."""
        self._process.kill()
        self._process.wait(timeout=10)

    def _signal(self, what: signal.Signals) -> None:
        # Only `exit_code` and `kill` reap it, so until then the number is its own.
        if self._process.returncode is None:
            os.kill(self._process.pid, what)


def packed(work: Any) -> bytes:
    """For `Order.work`. Raises ValueError if another process could not unpack it."""
    try:
        data = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"this cannot be sent to another process: {error}") from error
    if b"__main__" in data:
        raise ValueError("this cannot be sent to another process: it is of __main__; put it into a module")
    return data


def _spawn(order: Order) -> "subprocess.Popen[bytes]":
    # A file and no pipe: a stopped child reads nothing, and a pipe would be full after 64 KiB.
    with tempfile.TemporaryFile() as told, _log(order.log) as log:
        pickle.dump({"path": sys.path, "work": order.work}, told)
        told.seek(0)
        words = [sys.executable, "-m", order.module, str(os.getpid()), str(order.niceness)]
        return subprocess.Popen(
            words,
            stdin=told,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=order.fds,
            # A Ctrl-C in the terminal is not for it; and a stopped group whose parent has gone is woken and
            # hung up on, which is what ends it on systems that have no PR_SET_PDEATHSIG.
            process_group=0,
        )


def _log(path: Path | None) -> Any:
    return open(os.devnull, "ab") if path is None else path.open("ab")


def born(words: list[str]) -> Any:
    """The first thing the child does: see to it that it ends with its parent and disturbs nobody, stop until
    it is let, and only then read what it has to do. words: its arguments."""
    parent, niceness = int(words[0]), int(words[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # SIGKILL, as it also ends a process that is stopped.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _be_nice(niceness)
    os.kill(os.getpid(), signal.SIGSTOP)
    told = pickle.load(sys.stdin.buffer)
    sys.path[:] = told["path"]
    return pickle.loads(told["work"])


def _be_nice(niceness: int) -> None:
    os.nice(niceness)
    if niceness == 19 and sys.platform == "linux":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            return  # forbidden in some containers: 19 alone has to do
