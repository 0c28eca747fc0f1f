"""The local socket between a rank and its processes: rollout workers, and the connection to servers.

It has no name in the file system: only the two processes have its ends. A frame is a lane, a length and that
many bytes. Lane 0 has messages as JSON, the others the messages of rollouts.proto: a worker is a rollout
server with one stream, `WORKER_LANE`, and each connection to a server has a lane of its own. Nothing is
unpickled.

Neither side ever blocks on the other: what the socket does not take is kept until the next call. A rank that
trains for minutes does not stop its workers, and a worker that is suspended does not stop its rank.
"""

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

HEADER = struct.Struct(">IQ")
WORKER_LANE = 1
READ_BYTES = 1 << 18
FLUSH_S = 2.0
"""Limit of the time in which an error is sent before the process ends."""

Message = Mapping[str, Any]
"""`kind`, and the fields of that kind."""


class Channel:
    """One end of the connection. One thread may read while another one sends."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent, self._unread = bytearray(), bytearray()
        self._sending = threading.Lock()
        self.closed = False
        """The other end is gone. A frame that it did not finish is dropped."""

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message of lane 0, and write what the socket takes now."""
        self.send_frame(0, json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode())

    def send_frame(self, lane: int, data: bytes) -> None:
        """Queue a frame, and write what the socket takes now."""
        with self._sending:
            self._unsent += HEADER.pack(lane, len(data))
            self._unsent += data
        self.flush()

    def send_all(self, lane: int, data: bytes) -> None:
        """Send a frame, and wait until the socket has taken it or the other end is gone."""
        self.send_frame(lane, data)
        while self._unsent and not self.closed:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_WRITE)
                selector.select(1.0)
            self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            with self._sending:
                while self._unsent and not self.closed:
                    del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def receive(self) -> list[tuple[int, bytes]]:
        """Return lane and data of the frames that have arrived, without waiting."""
        while not self.closed:
            try:
                part = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self.closed = not part
            self._unread += part
        found, start = [], 0
        while len(self._unread) >= start + HEADER.size:
            lane, size = HEADER.unpack_from(self._unread, start)
            end = start + HEADER.size + size
            if len(self._unread) < end:
                break
            found.append((lane, bytes(self._unread[start + HEADER.size : end])))
            start = end
        del self._unread[:start]
        return found

    def first_frames(self, every_s: float = 0.5) -> list[tuple[int, bytes]]:
        """Wait for the first frames and return them; look every `every_s`.

        Raises:
            ConnectionError: The other end has closed the connection.
        """
        while not (frames := self.receive()):
            if self.closed:
                raise ConnectionError("the rank has closed the connection")
            Channel.wait([self], every_s)
        return frames

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
