"""A process that runs only while it is let: it is born stopped, and stopped and continued from outside.

SIGSTOP needs no answer: the kernel takes the process off its core at the next interrupt, whatever it is
doing, and everything it has stays where it is. Whoever was in the middle of a microbatch finishes it after
the next SIGCONT.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aedit.system import end_with_parent

SESSION_TRIES = 10
ON_LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What is to be started."""

    module: str
    """Its `main` begins with `read_work`."""
    work: bytes
    """What `read_work` returns, by `pickled`."""
    fds: tuple[int, ...] = ()
    niceness: int = 19
    """Above its node's own. 19: only what nobody else wants (SCHED_IDLE), where that may be asked."""
    log: Path | None = None
    """Where its standard output and errors go; nowhere by default."""


class SuspendedProcess:
    """A child that stops itself as soon as it is born, and has a low priority from its first instruction on.
    Start it in a thread that lasts: the kernel ends it together with that thread.

    Not for several threads at once: `let`, `hold` and `exit_code` belong under one lock of the caller's, so
    that no signal goes to a process that has been buried.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._process = _spawn(spec)
        # Here and not in the child: to load Python is work, too, and a step may begin meanwhile.
        _lower(self._process.pid, spec.niceness)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
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

    def resume(self) -> None:
        """Go on. Returns at once."""
        self._signal(signal.SIGCONT)

    def suspend(self) -> None:
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


def pickled(work: Any) -> bytes:
    """For `ProcessSpec.work`. Raises ValueError if another process could not unpack it."""
    try:
        data = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"this cannot be sent to another process: {error}") from error
    if b"__main__" in data:
        raise ValueError("this cannot be sent to another process: it is of __main__; put it into a module")
    return data


def _spawn(spec: ProcessSpec) -> "subprocess.Popen[bytes]":
    # A file and no pipe: a stopped child reads nothing, and a pipe would be full after 64 KiB.
    with tempfile.TemporaryFile() as payload, _log(spec.log) as log:
        pickle.dump({"path": sys.path, "work": spec.work}, payload)
        payload.seek(0)
        arguments = [sys.executable, "-m", spec.module, str(os.getpid())]
        return subprocess.Popen(
            arguments,
            stdin=payload,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=spec.fds,
            # A Ctrl-C in the terminal is not for it. On Linux a session of its own, which `_lower` can lower;
            # elsewhere a group, as a stopped group whose parent has gone is woken and hung up on, which is
            # what ends it on systems that have no PR_SET_PDEATHSIG.
            start_new_session=ON_LINUX,
            process_group=None if ON_LINUX else 0,
        )


def _log(path: Path | None) -> Any:
    return open(os.devnull, "ab") if path is None else path.open("ab")


def read_work(arguments: list[str]) -> Any:
    """The first thing the child does: see to it that it ends with its parent, stop until it is let, and only
    then read what it has to do. words: its arguments."""
    parent = int(arguments[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)  # SIGKILL also ends a process that is stopped
    os.kill(os.getpid(), signal.SIGSTOP)
    payload = pickle.load(sys.stdin.buffer)
    sys.path[:] = payload["path"]
    return pickle.loads(payload["work"])


def _lower(pid: int, niceness: int) -> None:
    """Let the process have only what is left over by others."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # Each may be forbidden in some containers, and the process may have ended: the others have to do.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(own + niceness, 19))
    if not ON_LINUX or niceness == 0:
        return
    if niceness == 19:
        with suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    # On desktops each session gets its share whatever the priorities in it are (sched_autogroup): 19 in a
    # session of one would be worth as much as 0.
    with suppress(OSError):
        _lower_session(Path(f"/proc/{pid}/autogroup"), niceness)


def _lower_session(autogroup: Path, niceness: int) -> None:
    """The kernel lets all of a machine do this ten times a second, and several ranks may begin at once."""
    for _ in range(SESSION_TRIES):
        try:
            autogroup.write_text(str(niceness))
        except BlockingIOError:
            time.sleep(0.11)
        else:
            return
