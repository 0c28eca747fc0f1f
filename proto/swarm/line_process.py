"""A child process that speaks JSON lines, and whose death, hang or noise harms nobody here."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

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
