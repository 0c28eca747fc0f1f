"""The pool's side of one worker process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aedit.spec_rollout.rl.rewards.reward import RewardSpec
from aedit.spec_rollout.rl.rewards.wire import Lines

END_S = 10.0
"""Longest wait for a killed process to be gone."""


class WorkerProcess:
    """A worker. It ends with the thread that has started it, which must last, or by `kill`."""

    def __init__(
        self,
        specs: tuple[RewardSpec, ...],
        columns: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process.

        columns: names that every problem has; None: the arguments of the functions are not checked.
        """
        self.awaits: Sequence[bool] | None = None
        """For each function whether it is asynchronous; None until it has imported all functions."""
        self.answered: set[int] = set()
        """Functions that have answered: their first call, which may load a model, is over."""
        self.started_s = clock()
        own, other = socket.socketpair()
        with other:
            self._process = _spawn(other.fileno())
        self.lines = Lines(own)
        functions = [asdict(spec) for spec in specs]
        self.lines.put({"path": sys.path, "functions": functions, "columns": columns})

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def answers(self) -> list[Any]:
        """Return what has arrived. Raises EOFError if the process has ended and nothing is left to read."""
        # Asked first, as what it has sent before its end is read below. And asked, as a process that it has
        # forked may keep the connection open.
        has_ended = self._process.poll() is not None
        self.lines.flush()
        found = self.lines.take()
        if has_ended and not found:
            raise EOFError
        return found

    def kill(self, grace_s: float = 0.0) -> str:
        """End the process and those that it has started in its group; return how it had ended before.

        Raises subprocess.TimeoutExpired if it is still there after 10 s.

        Args:
            grace_s: Time in which it may end by itself: its connection ends a moment before it does.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        code = self._process.poll()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=END_S)
        self.lines.close()
        if code is None:
            return "broke its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _spawn(fd: int) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C in the terminal does not reach it, and `kill` ends what it has started.
    # What the functions print goes to standard error: standard output may be read by a program.
    return subprocess.Popen(
        [sys.executable, "-m", "aedit.spec_rollout.rl.rewards.worker", str(os.getpid()), str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__ if _is_open(sys.__stderr__) else subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
    )


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return False
    return True
