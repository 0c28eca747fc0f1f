"""Lines of JSON between a pool and its worker, over a socket that never blocks the pool."""

import json
import socket
from typing import Any

PIECE_BYTES = 1 << 16


class Lines:
    """One end of the connection. Nothing else is ever written there: workers print to standard error."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._end.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Return true while something waits to be sent."""
        return bool(self._outgoing)

    def put(self, message: Any) -> None:
        """Send `message` as far as the other side reads it now, and the rest in later calls of `flush`."""
        self._outgoing += encoded(message)
        self.flush()

    def flush(self) -> None:
        """Send what the other side takes now. A connection that has ended is seen by `take`."""
        while self._outgoing:
            try:
                del self._outgoing[: self._end.send(self._outgoing[:PIECE_BYTES])]
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()

    def take(self) -> list[Any]:
        """Return the messages that have arrived whole.

        Raises EOFError if the other side has ended, and ValueError if it has sent something else than JSON.
        """
        ended = self._fill()
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        if ended and not lines:
            raise EOFError
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._end.close()

    def _fill(self) -> bool:
        """Read what is there; return true if nothing more will come."""
        while True:
            try:
                piece = self._end.recv(PIECE_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not piece:
                return True
            self._incoming += piece


def encoded(message: Any) -> bytes:
    """Return `message` as a line of JSON."""
    return json.dumps(message).encode() + b"\n"
