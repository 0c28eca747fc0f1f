"""Messages between a rank and its rollout workers: one line of JSON each, over a socket.

Neither side ever blocks on the other: what the socket does not take is kept until the next call. A rank that
trains for minutes does not stop its workers, and a worker that is suspended does not stop its rank.
"""

import json
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

READ_BYTES = 1 << 16
FLUSH_S = 2.0
"""Limit of the time in which an error is sent before the process ends."""

Message = Mapping[str, Any]
"""`kind`, and the fields of that kind."""


class Channel:
    """One end of the connection between two processes."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent, self._unread = bytearray(), bytearray()
        self.closed = False
        """The other end is gone. A line that it did not finish is dropped."""

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message, and write what the socket takes now."""
        self._unsent += json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._unsent and not self.closed:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting."""
        self.flush()
        while not self.closed:
            try:
                part = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self.closed = not part
            self._unread += part
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        return [json.loads(line) for line in lines]

    def first_messages(self, every_s: float = 0.5) -> list[Message]:
        """Wait for the first messages and return them; look every `every_s`.

        Raises:
            ConnectionError: The other end has closed the connection.
        """
        while not (messages := self.receive()):
            if self.closed:
                raise ConnectionError("the rank has closed the connection")
            Channel.wait([self], every_s)
        return messages

    def send_error(self, error: str) -> None:
        """Send the error that ends this process, as long as the other end reads."""
        deadline = time.monotonic() + FLUSH_S
        with suppress(OSError):
            self.send("error", message=error)
            while self._unsent and not self.closed and time.monotonic() < deadline:
                Channel.wait([self], 0.1)
                self.flush()

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()

    @staticmethod
    def wait(channels: Iterable["Channel"], timeout_s: float, sockets: Iterable[socket.socket] = ()) -> None:
        """Wait until a channel has something to read or takes what is unsent, or a socket can be read."""
        with selectors.DefaultSelector() as selector:
            for each in sockets:
                selector.register(each, selectors.EVENT_READ)
            for channel in channels:
                if not channel.closed:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel._unsent else 0)
                    selector.register(channel._socket, events)
            selector.select(timeout_s)
