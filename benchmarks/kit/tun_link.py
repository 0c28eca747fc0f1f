"""Long link between two network namespaces, for kernels without netem: delay, jitter, loss, rate, queue.

Each end is a TUN device; a child process carries packets from one to the other with the link's delay. Python
carries some ten thousand packets a second, so results are valid up to about 100 Mbit/s. Needs root.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kit import netns
from benchmarks.kit.netns import COMMAND_S, Place, run_command

ROOT = Path(__file__).parents[2]
DEVICE = Path("/dev/net/tun")
INTERFACE = "wire"
MTU = 1500
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LOOK_S = 0.05
_LONGEST = 1 << 16
_BURST = 64
"""Packets read from one end before the other end is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Properties of the link, which apply to each direction separately."""

    delay_s: float = 0.0
    """Delay from one end to the other, on an empty link."""
    jitter_s: float = 0.0
    """On top, up to this much, drawn for each packet; they stay in order, as on one path they do."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    rate_mbit: float = 100.0
    queue_s: float = 0.2
    """A packet that would wait longer for its turn is dropped: the buffer of the router before the wire."""
    mtu: int = MTU
    """Longest packet: with longer ones Python carries more."""
    seed: int = 0


class Lane:
    """One direction of a link, independent of clocks and sockets."""

    def __init__(self, wire: Wire, rng: random.Random) -> None:
        self._wire, self._rng = wire, rng
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.lost = 0
        self.dropped = 0

    def send(self, packet: bytes, now: float) -> None:
        """Send a packet at time `now`, unless it is lost or the queue is full."""
        wire = self._wire
        if self._rng.random() < wire.loss:
            self.lost += 1
            return
        turn = max(self._free_at, now)
        if turn - now > wire.queue_s:
            self.dropped += 1
            return
        self._free_at = turn + 8 * len(packet) / (1e6 * wire.rate_mbit)
        at = self._free_at + wire.delay_s + self._rng.uniform(0, wire.jitter_s)
        self._under_way.append((at, packet))  # behind those before it, even if their jitter is longer

    @property
    def next_at(self) -> float:
        """Return when the next packet arrives; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def arrived(self, now: float) -> Iterator[bytes]:
        """Yield and remove the packets that have arrived by `now`."""
        while self._under_way and self._under_way[0][0] <= now:
            yield self._under_way.popleft()[1]


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes through one end's interface, with headers."""

    sent: int
    received: int


def counted(place: Place) -> Counted:
    """Return what the kernel has counted at `place` so far."""
    said = run_command(f"ip -n {place.namespace} -s -j link show dev {place.interface}")
    stats = json.loads(said)[0]["stats64"]
    return Counted(stats["tx"]["bytes"], stats["rx"]["bytes"])


def why_not() -> str | None:
    """Return why this machine cannot have such a link; None if it can."""
    if not DEVICE.exists():
        return f"needs {DEVICE}: not run"
    return netns.why_not()


@contextmanager
def link(wire: Wire) -> Iterator[tuple[Place, Place]]:
    """Set up two namespaces with `wire` between them.

    They are removed afterwards, also after Ctrl-C or SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ends = tuple(Place(f"aedit-{os.getpid()}-wire{n}", INTERFACE, f"10.78.0.{n + 1}") for n in range(2))
    made: list[str] = []
    try:
        for place in ends:
            run_command(f"ip netns add {place.namespace}")
            made.append(place.namespace)
            run_command(f"ip -n {place.namespace} link set lo up")
        with _pump(wire, ends):
            yield ends[0], ends[1]
    finally:
        for name in made:
            run_command(f"ip netns del {name}")
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _pump(wire: Wire, ends: tuple[Place, ...]) -> Iterator[None]:
    """Run the child process that carries packets; it also ends with this process."""
    job = json.dumps({"wire": asdict(wire), "ends": [asdict(place) for place in ends]})
    command = [sys.executable, "-m", "benchmarks.kit.tun_link", job]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        ready, _, _ = select.select([child.stdout], [], [], COMMAND_S)
        if not ready or child.stdout.readline().strip() != "ready":
            raise RuntimeError("the wire did not start; see the lines above")
        yield
    finally:
        child.stdin.close()
        try:
            child.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(COMMAND_S)
        child.stdout.close()


# -- in the child


def carry(wire: Wire, ends: tuple[Place, Place]) -> None:
    """Carry packets both ways until stdin is closed."""
    first, second = _tun(ends[0], ends[1].address, wire.mtu), _tun(ends[1], ends[0].address, wire.mtu)
    # One lane per direction, and the device its packets come out of.
    lanes = {
        first: (Lane(wire, random.Random(2 * wire.seed)), second),
        second: (Lane(wire, random.Random(2 * wire.seed + 1)), first),
    }
    print("ready", flush=True)
    poll = select.poll()
    for fd in (first, second, sys.stdin.fileno()):
        poll.register(fd, select.POLLIN)
    while True:
        now = time.monotonic()
        next_at = min(lane.next_at for lane, _ in lanes.values())
        for fd, _ in poll.poll(1000 * max(0.0, min(_LOOK_S, next_at - now))):
            if fd not in lanes:
                return
            _take(fd, lanes[fd][0])
        now = time.monotonic()
        for lane, out in lanes.values():
            for packet in lane.arrived(now):
                with suppress(BlockingIOError, OSError):  # a device that is going down drops it
                    os.write(out, packet)


def _take(fd: int, lane: Lane) -> None:
    for _ in range(_BURST):
        try:
            packet = os.read(fd, _LONGEST)
        except BlockingIOError:
            return
        lane.send(packet, time.monotonic())


def _tun(place: Place, peer: str, mtu: int) -> int:
    """Create a TUN device at `place`, up and with a route to its peer; return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/var/run/netns/{place.namespace}", os.O_RDONLY)
    try:
        _enter(libc, other)
        device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22s", place.interface.encode(), _IFF_TUN | _IFF_NO_PI, b"")
        fcntl.ioctl(device, _TUNSETIFF, request)
        run_command(f"ip addr add {place.address}/32 peer {peer} dev {place.interface}")
        run_command(f"ip link set {place.interface} mtu {mtu} txqueuelen 5000 up")
        return device
    finally:
        _enter(libc, own)
        os.close(own)
        os.close(other)


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    left, right = (Place(**end) for end in given["ends"])
    carry(Wire(**given["wire"]), (left, right))
