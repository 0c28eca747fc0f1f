"""Child process that starts suspended, and is resumed and suspended by signals.

SIGSTOP needs no answer: the kernel takes the process off its core at the next interrupt, whatever it is
doing. A microbatch that was interrupted is finished after the next SIGCONT.
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

from aedit.child import begin_child, start_module
from aedit.system import no_collections

SESSION_TRIES = 10
ON_LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Description of a child process."""

    module: str
    """Module whose `main` begins with `read_work`."""
    work: bytes
    """Work for the process, as `pickled` makes it; `read_work` returns it there."""
    fds: tuple[int, ...] = ()
    """File descriptors that the child inherits."""
    niceness: int = 19
    """Niceness above the parent's. 19 also means SCHED_IDLE where it is available: only time that no other
    process wants."""
    log: Path | None = None
    """File of its standard output and error; None discards them."""


class SuspendedProcess:
    """A child process that suspends itself as soon as it has started.

    It has a low priority from its first instruction on. Start it in a thread that lasts: the kernel ends the
    child together with that thread. Not thread-safe: hold one lock around `resume`, `suspend` and
    `exit_code`, so that no signal is sent to a process that has been reaped.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._process = _spawn(spec)
        # Set here and not in the child: loading Python takes processor time, too.
        _lower(self._process.pid, spec.niceness)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Return true if it has suspended itself for the first time, or has ended.

        This takes a tenth of a second. Send no signals before: a child that is suspended before it is bound
        to its parent would outlive it.
        """
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def is_starved(self, cpu_s: float) -> bool:
        """Return true if it is runnable but has had too little processor time.

        Args:
            cpu_s: Processor seconds since its start that are enough.
        """
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_RUNNING and sum(process.cpu_times()[:2]) < cpu_s
        except psutil.NoSuchProcess:
            return False

    def resume(self) -> None:
        """Send SIGCONT and return at once."""
        self._signal(signal.SIGCONT)

    def suspend(self) -> None:
        """Send SIGSTOP and return at once. The process is off its core a moment later."""
        self._signal(signal.SIGSTOP)

    def exit_code(self) -> int | None:
        """Return the exit code (-9: killed), or None while it is alive."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process, suspended or not, and wait until it is gone.

        Raises:
            subprocess.TimeoutExpired: It is still there after 10 s.
        """
        self._process.kill()
        self._process.wait(timeout=10)

    def _signal(self, what: signal.Signals) -> None:
        # Only `exit_code` and `kill` reap it, so until then the process id is not reused.
        if self._process.returncode is None:
            os.kill(self._process.pid, what)


def pickled(work: Any) -> bytes:
    """Return `work` in the form that `ProcessSpec.work` needs.

    Raises:
        ValueError: Another process could not unpickle it.
    """
    try:
        data = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"this cannot be sent to another process: {error}") from error
    if b"__main__" in data:
        raise ValueError(
            "this cannot be sent to another process: it is defined in __main__; put it into a module"
        )
    return data


def _spawn(spec: ProcessSpec) -> "subprocess.Popen[bytes]":
    # A file, not a pipe: a suspended child does not read, and a pipe blocks after 64 KiB.
    with tempfile.TemporaryFile() as payload, open(spec.log or os.devnull, "ab") as log:
        pickle.dump({"path": sys.path, "work": spec.work}, payload)
        payload.seek(0)
        return start_module(spec.module, fds=spec.fds, stdin=payload, stdout=log, stderr=subprocess.STDOUT)


def read_work(arguments: list[str]) -> tuple[Any, float]:
    """Suspend the child until it is resumed for the first time.

    It must be the first call of the child. It also binds the child to its parent's life.

    Args:
        arguments: Command line arguments of the child; the first is the parent's process id.

    Returns:
        The work of the child, and the processor time in seconds that it had used when it was resumed.
    """
    begin_child(arguments)
    os.kill(os.getpid(), signal.SIGSTOP)
    used_s = time.process_time()
    payload = pickle.load(sys.stdin.buffer)
    sys.path[:] = payload["path"]
    with no_collections():
        return pickle.loads(payload["work"]), used_s  # this loads torch


def _lower(pid: int, niceness: int) -> None:
    """Give the process the lowest priority that is available."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # Each call may be forbidden in a container, and the process may have ended: continue with the others.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(own + niceness, 19))
    if not ON_LINUX or niceness == 0:
        return
    if niceness == 19:
        with suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    # With sched_autogroup (desktops) each session gets an equal share whatever the niceness in it is: the
    # niceness of the session must be set as well.
    with suppress(OSError):
        _lower_session(Path(f"/proc/{pid}/autogroup"), niceness)


def _lower_session(autogroup: Path, niceness: int) -> None:
    """Set the niceness of the process's session.

    The kernel allows this ten times a second on the whole machine, and several ranks may start at the same
    time.
    """
    for _ in range(SESSION_TRIES):
        try:
            autogroup.write_text(str(niceness))
        except BlockingIOError:
            time.sleep(0.11)
        else:
            return
