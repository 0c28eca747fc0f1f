"""Processes that run hivemind: the parent's side, the child's frame, and the end of all that hivemind starts.

The child is isolated: a crash, a hang or output of it does not affect the parent. `HivemindProcess` starts it
again whenever it ends.
"""

import asyncio
import importlib.util
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from aedit.child import begin_child, end_group, start_module
from aedit.system import end_with_parent, growing_pause_s
from aedit.types import UserError, printable

log = logging.getLogger(__name__)

Say = Callable[..., None]
_LISTENS = "-listen=/unix"
"""Beginning of the argument of p2pd that names its socket."""
_SOCKET = re.compile(r"/tmp/hivemind-p2pd-[\w-]+\.sock")
_MOST_LINE_BYTES = 2**23
_READ_BYTES = 2**16
_LONGEST_PAUSE_S = 30.0
_END_S = 15.0


def run_child(serve: Callable[[Say], None]) -> NoReturn:
    """Run `serve` in this process, which ends with its parent, report an error, and end the process.

    `serve` gets a function that writes its keyword arguments as a JSON line to standard output, between which
    nothing comes that hivemind prints.
    """
    begin_child(sys.argv[1:])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    code = 0
    try:
        bind_children(say)
        serve(say)
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}")
        code = 1
    os._exit(code)  # hivemind leaves threads behind


def bind_children(say: Say) -> None:
    """Let processes that hivemind forks, and p2pd, end with their parents; report p2pd's id and socket."""
    parents = [os.getpid()]
    os.register_at_fork(
        before=lambda: parents.append(os.getpid()),
        after_in_child=lambda: end_with_parent(parents[-1], signal.SIGKILL),
    )
    start = asyncio.subprocess.create_subprocess_exec

    async def started(*arguments: Any, **options: Any) -> Any:
        ends = partial(end_with_parent, os.getpid(), signal.SIGKILL)
        process = await start(*arguments, **options, preexec_fn=ends)
        listens = [each for each in map(str, arguments) if each.startswith(_LISTENS)]
        say(p2pd=process.pid, socket=listens[0].removeprefix(_LISTENS) if listens else "")
        return process

    asyncio.subprocess.create_subprocess_exec = started


def remove_socket(path: str) -> None:
    """Remove the socket of p2pd, which stays when it is killed; do nothing if `path` is none."""
    if _SOCKET.fullmatch(path):
        Path(path).unlink(missing_ok=True)


class LineProcess:
    """A child process of `start_module` that exchanges lines of JSON. For one thread at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the child, whose first argument is the id of this process.

        Raises OSError if there is no such program.
        """
        pipe = subprocess.PIPE
        self._process = start_module(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._held = b""

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a line; return False if the child has ended or does not read."""
        line = json.dumps(message).encode() + b"\n"
        try:
            return os.write(self._input.fileno(), line) == len(line)
        except OSError:
            return False

    def read(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, after `timeout_s` at the latest.

        None if the child has closed its output, or writes what is no message.
        """
        ready, _, _ = select.select([self._output], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(self._output.fileno(), _READ_BYTES)
        *lines, self._held = (self._held + data).split(b"\n")
        if not data or len(self._held) > _MOST_LINE_BYTES:
            return None
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return found if all(isinstance(message, dict) for message in found) else None

    def end(self) -> None:
        """Kill the child and everything that it has started, and wait for its end."""
        end_group(self._process)
        with suppress(OSError):
            self._input.close()
        self._output.close()


class HivemindProcess(ABC):
    """A `LineProcess` that is started again whenever it ends, after growing pauses, until `close`.

    A subclass calls `_start` at the end of its constructor. Its other methods here are called by the thread
    that starts the child: the kernel ends the child with that thread.
    """

    def __init__(
        self, command: Sequence[str], *, use: str, name: str, first_pause_s: float, look_s: float
    ) -> None:
        """Create it without a child.

        Args:
            command: Program of the child; the id of this process is added to it.
            use: What needs hivemind, for the error message.
            name: Name of the thread.
            first_pause_s: Pause after the first failure; each further one doubles it, up to 30 s.
            look_s: Longest time between two calls of `_turn`.

        Raises:
            UserError: hivemind is not installed.
        """
        if importlib.util.find_spec("hivemind") is None:
            raise UserError(f"{use} needs hivemind: pip install 'aedit[swarm]'")
        self._command, self._first_pause_s, self._look_s = command, first_pause_s, look_s
        self.failures = 0
        """Ends of the child since it worked last; a subclass sets it to 0 when the child works."""
        self.pids: tuple[int, ...] = ()
        """Ids of the child and of its p2pd, while they run."""
        self._started_s = self._spoke_s = 0.0
        """When the child was started, and when its last message arrived."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _first_message(self) -> Mapping[str, Any]:
        """Return the settings for the child."""

    @abstractmethod
    def _take(self, message: dict[str, Any]) -> None:
        """Take a message of the child."""

    @abstractmethod
    def _turn(self, process: LineProcess) -> str:
        """Send what is to be sent; return why the child must end, "" if it must not."""

    @abstractmethod
    def _ended(self, reason: str) -> None:
        """Note that the child has ended."""

    def _start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the child. May be called more than once."""
        self._closed.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                reason = self._attempt()
            except Exception as error:  # whatever it is, the caller goes on without the child
                log.exception("the %s process failed here", self._thread.name)
                reason = str(error)
            self.pids = ()
            self._ended(reason)
            pause_s = growing_pause_s(self.failures, self._first_pause_s, _LONGEST_PAUSE_S)
            self.failures += 1
            self._closed.wait(pause_s)

    def _attempt(self) -> str:
        """Run the child until it ends, hangs, or `close` is called; return why it has ended."""
        settings, reason = self._first_message(), "its process has ended"
        process = LineProcess(self._command)
        self.pids, sockets = (process.pid,), []
        self._started_s = self._spoke_s = monotonic()
        try:
            if not process.send(settings):
                return reason
            while not self._closed.is_set():
                messages = process.read(self._look_s)
                if messages is None:
                    return reason
                for message in messages:
                    self._spoke_s = monotonic()
                    if "p2pd" in message:
                        self.pids = (*self.pids, int(message["p2pd"]))
                        sockets.append(str(message.get("socket", "")))
                    if "error" in message:
                        reason = printable(str(message["error"]), 256)
                    self._take(message)
                if must_end := self._turn(process):
                    return must_end
            return "closed"
        finally:
            process.end()
            for socket in sockets:
                remove_socket(socket)
