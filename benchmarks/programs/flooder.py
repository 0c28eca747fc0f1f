"""A client of `benchmarks.hub` that sends frames of HTTP/2 which become no message, without a token.

    python -m benchmarks.programs.flooder '{"hub": "127.0.0.1:7000", "kind": "literal", ...}'

Prints one JSON line when its time is over.
"""

import json
import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from benchmarks.programs.light_members import HEADERS, PREFACE, SETTINGS, frame, headers

CONTINUATION = 9
FRAME_BYTES, FRAMES = 2**14, 16
HOST = "127.0.0.9"
"""Where its connections come from, so that no member is of its host."""

KINDS = {
    "literal": (b"\x00\x01x\x7f\xff\xff\xff\x7f", b"x"),
    "short literals": (b"", b"\x00\x01x\x01y"),
    "indexed": (b"", b"\x82"),
    "empty": (b"", b""),
}
"""What a header block begins with, and what its CONTINUATION frames repeat: one literal of 256 MiB, literals
of two bytes, fields of the static table, nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """Connections of one process. One that is ended is made again."""

    hub: str
    kind: str
    connections: int = 16
    seconds: float


@dataclass(slots=True)
class Flooded:
    """What became of a flood."""

    sent_bytes: int = 0
    ended: int = 0
    """Connections that the hub has ended, or not accepted."""


class Flooder:
    """One connection with a header block that has no end."""

    def __init__(self, hub: str, kind: str) -> None:
        """Connect and begin the block. Raises OSError if the hub does not accept."""
        host, _, port = hub.rpartition(":")
        begins, repeats = KINDS[kind]
        self.socket = socket.create_connection((host, int(port)), 5.0, (HOST, 0))
        block = headers("/aedit.v1.Membership/Heartbeat", hub) + begins
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, block))
        self.socket.setblocking(False)
        body = repeats * (FRAME_BYTES // len(repeats) if repeats else 0)
        self._data = memoryview(frame(CONTINUATION, 0, 1, body) * (FRAMES if body else FRAMES * 1000))
        self._at = 0

    def send(self) -> int:
        """Send what the kernel takes; return the bytes. Raises OSError if the hub has ended it."""
        with suppress(BlockingIOError):
            while self.socket.recv(2**16):
                pass
            raise ConnectionError("the hub has ended the connection")
        sent = 0
        with suppress(BlockingIOError):
            sent = self.socket.send(self._data[self._at :])
        self._at = (self._at + sent) % len(self._data)
        return sent


def run(job: Flood) -> Flooded:
    """Flood for the time of the job."""
    found, end_s = Flooded(), time.monotonic() + job.seconds
    with selectors.DefaultSelector() as ready:
        while time.monotonic() < end_s:
            for _ in range(job.connections - len(ready.get_map())):
                try:
                    flooder = Flooder(job.hub, job.kind)
                except OSError:
                    found.ended += 1
                    break
                ready.register(flooder.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, flooder)
            for key, _ in ready.select(0.05):
                try:
                    found.sent_bytes += key.data.send()
                except OSError:
                    ready.unregister(key.fileobj)
                    key.data.socket.close()
                    found.ended += 1
        for key in list(ready.get_map().values()):
            key.data.socket.close()
    return found


if __name__ == "__main__":
    os.nice(19)  # an attacker computes elsewhere
    print(json.dumps(asdict(run(Flood(**json.loads(sys.argv[1]))))))
