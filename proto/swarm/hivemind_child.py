"""Processes that run hivemind: messages to the parent, and the end of all that hivemind starts.

`LineProcess` is the parent's side. It is isolated: a crash, hang or output of the child does not affect it.
"""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aedit.system import end_with_parent

Say = Callable[..., None]
_LISTENS = "-listen=/unix"
"""Beginning of the word on p2pd's command line that names its socket."""
_SOCKET = re.compile(r"/tmp/hivemind-p2pd-[\w-]+\.sock")


def begin(parent: int) -> Say:
    """Bind this process and those that it starts to the process `parent`; return the function that writes.

    The function writes its keyword arguments as a JSON line to standard output, between which nothing comes
    that hivemind prints.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    bind_children(say)
    return say


def bind_children(say: Say) -> None:
    """Let processes that hivemind forks, and p2pd, end with their parents; tell p2pd's id and its socket."""
    parents = [os.getpid()]
    os.register_at_fork(
        before=lambda: parents.append(os.getpid()),
        after_in_child=lambda: end_with_parent(parents[-1], signal.SIGKILL),
    )
    start = asyncio.subprocess.create_subprocess_exec

    async def started(*words: Any, **options: Any) -> Any:
        ends = partial(end_with_parent, os.getpid(), signal.SIGKILL)
        process = await start(*words, **options, preexec_fn=ends)
        listens = [str(word) for word in words if str(word).startswith(_LISTENS)]
        say(p2pd=process.pid, socket=listens[0].removeprefix(_LISTENS) if listens else "")
        return process

    asyncio.subprocess.create_subprocess_exec = started


def remove_socket(path: str) -> None:
    """Remove the socket of p2pd, which stays when it is killed; do nothing if `path` is none."""
    if _SOCKET.fullmatch(path):
        Path(path).unlink(missing_ok=True)


_MOST_LINE_BYTES = 2**23
_READ_BYTES = 2**16


class LineProcess:
    """A child process in a session of its own. For one thread at a time, which must live as long as it.

    The child must end with its parent by itself.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start the child. Raises OSError if there is no such program."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
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
        # It is not waited for yet, so that its id, which is that of the group, belongs to nobody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        with suppress(OSError):
            self._input.close()
        self._output.close()
