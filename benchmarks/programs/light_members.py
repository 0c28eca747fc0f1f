"""Members of `benchmarks.hub` that only report: thousands in one process, each with a connection of its own.

Each speaks HTTP/2 over its own TCP connection, with the frames that gRPC's client sends: a call is a HEADERS
and a DATA frame, and a connection on which nothing has arrived for 5 s is pinged. So the hub does all that it
does for a node that trains, and the members cost little beside it. A member beats at the interval that the
last reply asked for. Prints "ready" once all have joined, begins to count when a line comes in, and prints
one JSON line at the end.
"""

import heapq
import json
import random
import select
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass, field

from aedit.proto.rpc import hub_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PING_S = 5.0
"""Silence after which a node's client pings; see `proto.rpc.client`."""
JOINING = 32
"""Members that join at a time."""
WINDOW = 2**15
JOINS_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """Members of one process."""

    hub: str
    run: str
    count: int
    seconds: float
    units: int
    numel: int


@dataclass(slots=True)
class Beats:
    """What happened while beats were counted."""

    beat_s: list[float] = field(default_factory=list)
    """Seconds until the hub answered each."""
    pings: int = 0
    refused: int = 0
    """Calls without an answer: a member that had expired, for one."""
    asked_s: float = 0.0
    """Interval that the last reply asked for."""
    open_s: list[float] = field(default_factory=list)
    """Seconds for which calls without an answer had waited at the end."""


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def headers(path: str, authority: str) -> bytes:
    """Return a gRPC call's header block: literals without Huffman coding or a table."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "light",
    }
    text = [(name.encode(), value.encode()) for name, value in pairs.items()]
    return b"".join(bytes((0, len(n))) + n + bytes((len(v),)) + v for n, v in text)


class Member:
    """One connection, and at most one call at a time."""

    def __init__(self, job: Light, number: int) -> None:
        """Connect from one of 250 loopback addresses, as a host has a limit of connections."""
        self.name = f"light-{number}"
        host, _, port = job.hub.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 60.0, (f"127.0.1.{1 + number % 250}", 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.socket.setblocking(False)
        self._authority, self._stream, self._unread, self._inbox = job.hub, -1, 0, bytearray()
        self.message = b""
        self.who = pb.Who(run=job.run)
        self.began_s = self.received_s = 0.0
        self.calls = ""
        """Name of the call under way; empty: none."""

    def call(self, name: str, request: bytes, now: float) -> None:
        """Begin a call."""
        self._stream += 2
        self.calls, self.began_s, self.message = name, now, b""
        block = headers(f"/aedit.v1.Membership/{name}", self._authority)
        body = b"\0" + struct.pack(">I", len(request)) + request
        self._send(
            frame(HEADERS, END_HEADERS, self._stream, block) + frame(DATA, END_STREAM, self._stream, body)
        )

    def ping(self) -> None:
        """Ask the hub for a sign of life."""
        self._send(frame(PING, 0, 0, bytes(8)))

    def read(self, now: float) -> bool:
        """Take what has arrived; return whether the call is over."""
        data = self.socket.recv(2**16)
        if not data:
            raise ConnectionError(f"{self.name}: the hub has closed the connection")
        self.received_s, is_over, inbox = now, False, self._inbox
        inbox += data
        while len(inbox) >= 9:
            size = int.from_bytes(inbox[:3], "big")
            if len(inbox) < 9 + size:
                break
            kind, flags, body = inbox[3], inbox[4], bytes(inbox[9 : 9 + size])
            stream = int.from_bytes(inbox[5:9], "big") & 2**31 - 1
            del inbox[: 9 + size]
            is_over |= self._take(kind, flags, stream, body)
        return is_over

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> bool:
        """Take one frame; return whether it ends the call."""
        if kind == SETTINGS and not flags & ACK:
            self._send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, body))
        elif kind == GOAWAY:
            raise ConnectionError(f"{self.name}: the hub ends the connection: {body[8:]!r}")
        elif kind == DATA:
            self.message += body
            self._unread += len(body)
            if self._unread > WINDOW:
                self._send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unread)))
                self._unread = 0
        ends = kind in (DATA, HEADERS) and bool(flags & END_STREAM)
        return stream == self._stream and (ends or kind == RST_STREAM)

    def _send(self, data: bytes) -> None:
        """Send all of a few hundred bytes; the socket's buffer is empty but for a hub that hangs."""
        if (sent := self.socket.send(data)) != len(data):
            raise ConnectionError(f"{self.name}: {sent} of {len(data)} bytes were taken")


class Crowd:
    """All members of one process, in one thread."""

    def __init__(self, job: Light) -> None:
        self.job, self.beats, self.counts = job, Beats(), False
        self._poll = select.epoll()
        self._by_fd: dict[int, Member] = {}
        self._due: list[tuple[float, int, bool]] = []
        """Time, descriptor, and whether a ping is due then, not a beat."""
        self._left = 0
        self._numbers = iter(range(job.count))

    def join(self) -> None:
        """Connect and join, some at a time, and beat from then on."""
        deadline = time.monotonic() + JOINS_WITHIN_S
        self._left = self.job.count
        for _ in range(JOINING):
            self._join_one()
        while self._left:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._left} of {self.job.count} members have not joined")
            self.turn()

    def run(self, seconds: float) -> None:
        """Beat for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.turn()

    def close(self) -> None:
        """Close all connections; no member leaves."""
        for member in self._by_fd.values():
            member.socket.close()
        self._poll.close()

    def note_open(self) -> None:
        """Note the calls that have no answer yet."""
        now = time.monotonic()
        self.beats.open_s = [now - member.began_s for member in self._by_fd.values() if member.calls]

    def turn(self) -> None:
        """Send what is due, and take what has arrived."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, fd, is_ping = heapq.heappop(self._due)
            self._ping(fd, now) if is_ping else self._beat(fd, now)
        wait_s = self._due[0][0] - now if self._due else 0.1
        for fd, _ in self._poll.poll(min(max(wait_s, 0.0), 0.1)):
            member = self._by_fd[fd]
            if member.read(now := time.monotonic()):
                self._answered(fd, member, now)

    def _join_one(self) -> None:
        if (number := next(self._numbers, None)) is None:
            return
        member = Member(self.job, number)
        fd = member.socket.fileno()
        self._by_fd[fd] = member
        self._poll.register(fd, select.EPOLLIN)
        request = pb.JoinRequest(who=member.who, name=member.name, num_samples=1_000_000, ranks=1)
        for unit in range(self.job.units):
            tensor = pb.Tensor(name="w", shape=[self.job.numel])
            request.layout.append(pb.Unit(name=f"blocks.{unit}", tensors=[tensor]))
        member.call("Join", request.SerializeToString(), time.monotonic())

    def _beat(self, fd: int, now: float) -> None:
        member = self._by_fd[fd]
        if member.calls:  # the last one is not answered yet
            heapq.heappush(self._due, (now + 0.05, fd, False))
            return
        request = pb.HeartbeatRequest(who=member.who, steps=1, steps_per_s=50.0, state="training")
        member.call("Heartbeat", request.SerializeToString(), now)

    def _ping(self, fd: int, now: float) -> None:
        member = self._by_fd[fd]
        if now - member.received_s >= PING_S:
            member.ping()
            self.beats.pings += self.counts
            member.received_s = now
        heapq.heappush(self._due, (member.received_s + PING_S, fd, True))

    def _answered(self, fd: int, member: Member, now: float) -> None:
        name, member.calls = member.calls, ""
        if not member.message:
            if name == "Join":
                raise RuntimeError(f"{member.name} was not let in")
            self.beats.refused += 1
            return
        news = pb.News()
        if name == "Join":
            reply = pb.JoinReply.FromString(member.message[5:])
            member.who = pb.Who(run=self.job.run, term=reply.term, node=reply.node, session=reply.session)
            heapq.heappush(self._due, (now + PING_S, fd, True))
            self._left -= 1
            self._join_one()
            news = reply.news
        else:
            news.ParseFromString(member.message[5:])
            if self.counts:
                self.beats.beat_s.append(now - member.began_s)
        self.beats.asked_s = news.heartbeat_s
        heapq.heappush(self._due, (now + news.heartbeat_s * random.uniform(0.9, 1.1), fd, False))


def run(job: Light) -> Beats:
    """Run all members of this process."""
    crowd = Crowd(job)
    crowd.join()
    print("ready", flush=True)
    with select.epoll() as begins:
        begins.register(sys.stdin.fileno(), select.EPOLLIN)
        while not begins.poll(0):
            crowd.run(0.5)
    sys.stdin.readline()
    crowd.counts = True
    crowd.run(job.seconds)
    crowd.note_open()
    return crowd.beats


if __name__ == "__main__":
    print(json.dumps(asdict(run(Light(**json.loads(sys.argv[1]))))))
