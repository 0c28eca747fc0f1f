"""Connections of a server: how many a host may have, and how much they may send that is in no message.

gRPC accepts every connection and does not report it, so the sockets are found among the descriptors of this
process. It reads header blocks without an end, pings and settings before any handler, and bounds none of
them; so the kernel's count of received bytes is compared with the messages that have arrived. Does nothing
where there is no /proc.
"""

import ctypes
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address

from aedit.proto.rpc.frames import CHUNK_BYTES

_DESCRIPTORS = "/proc/self/fd"
_MOST_DESCRIPTORS = 2**16
_RESERVED = 256
"""Descriptors for the journal and everything else but connections."""
_REMEMBERED = 2**17
"""Peers; more than there can be connections."""
_LOOK_S, _LOOK_IDLE_S, _LOOK_AGAIN_S = 0.1, 1.0, 0.02
"""Interval between two looks, also in an idle process and while a connection may begin a flood."""
_LOOK_ALONE_S = 2.0
"""The same without a connection: an idle process is to sleep."""
_BUSY = 0.2
"""Share of a core from which on this process is busy."""
_TIMES_LOOK = 50
"""Times that a look takes, before the next one."""
_DRAINED_BYTES = 2**16


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if wanted > soft:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Return how many connections leave enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 2, soft - _RESERVED)


@dataclass(frozen=True, slots=True)
class AcceptedSocket:
    """An accepted connection, as it was found."""

    descriptor: int
    host: str
    peer: str
    """The other end, as gRPC writes it."""
    received: int
    """Bytes, by the kernel's count; 0 where it has none."""
    sent: int
    """Bytes that the peer has acknowledged."""


MOST_UNREAD, MOST_SILENT = 4 * CHUNK_BYTES, 5 * CHUNK_BYTES // 4
"""Bytes of a connection in no message: windows and messages of uploads that wait to be read; the same before
its first message."""
_MOST_SILENT_HOST = 8 * CHUNK_BYTES
"""The same of all connections of a host together that have sent no message yet."""
_PER_BYTE, _PER_MESSAGE = 1.05, 2 * CHUNK_BYTES
"""Bytes that a message accounts for: its own with frames and TLS, and a window and a message behind it, which
are lost when a push is refused."""
_MOST_AHEAD = 64 * CHUNK_BYTES
"""Bytes that messages account for in advance at most."""
_SENT_PER_UPDATE = 128
"""Bytes sent for a byte of window updates, at least."""
_SHUT_OUT_S, _SHUT_OUT_BYTES = 30.0, 2**16
"""Time in which a host that has flooded makes no new connection, and what those that it has may send."""
_MOST_SHUT_OUT = 512
"""Hosts, the latest; a filter has up to 4,096 instructions."""
_LOCAL = ("127.0.0.1", "::1")
"""Hosts that are never shut out: all tunnels and all nodes of this machine come from there."""


class ConnectionLimit:
    """Ends connections of a host that has more than `most_per_host`, and those that flood."""

    def __init__(self, most_per_host: int) -> None:
        self._most_per_host = most_per_host
        self._lock = threading.Lock()
        self._accounted: OrderedDict[str, float] = OrderedDict()
        """Bytes that messages account for since the last look, by peer; the latest to send is the last."""
        self._seen: dict[str, tuple[AcceptedSocket, float]] = {}
        """Connections at the last look, by peer, each with its bytes that are in no message."""
        self._shut_out: dict[str, float] = {}
        """Hosts that have flooded, and the end of the time in which they are shut out."""
        self._at_s = self._asked_s = self._cpu_s = self._took_s = 0.0
        """Times of the last look and of the last question, CPU time then, and that of the look."""
        self.pause_s = _LOOK_ALONE_S
        """Time until the next question, unless `awake` is set."""
        self.awake = threading.Event()
        """The first connection has sent a message, or the server ends."""

    def received(self, peer: str, num_bytes: int) -> None:
        """Note that a message of this peer, as gRPC writes it, has arrived."""
        if self.pause_s == _LOOK_ALONE_S:
            self.pause_s = _LOOK_S
            self.awake.set()
        with self._lock:
            before = self._accounted.pop(peer, 0.0)
            self._accounted[peer] = before + _PER_BYTE * num_bytes + _PER_MESSAGE
            if len(self._accounted) > _REMEMBERED:
                self._accounted.popitem(last=False)

    def end(self, port: int, peer: str) -> None:
        """End the connection of this peer to `port`."""
        if os.path.isdir(_DESCRIPTORS):
            for connection in accepted_sockets(port):
                if connection.peer == peer:
                    _shut(connection)

    def cut(self, port: int) -> int:
        """End the connections to `port` that flood, and those above the limit of a host; return how many."""
        if not os.path.isdir(_DESCRIPTORS):
            return 0
        began_s, before = time.thread_time(), self._shut_out.keys()
        ended = [*self.flooding(accepted_sockets(port), time.monotonic()), *self.surplus()]
        if self._shut_out.keys() != before:
            for listener in _listeners(port):
                with suppress(OSError), listener:
                    _attach(listener, source_filter(self._shut_out))
        self._took_s = time.thread_time() - began_s
        return sum(map(_shut, ended))

    def is_due(self, now_s: float, cpu_s: float) -> bool:
        """Return whether to look at the connections now; asked again and again.

        cpu_s: CPU time of this process, which a flood takes.
        """
        is_busy = cpu_s - self._cpu_s > _BUSY * (now_s - self._asked_s)
        self._asked_s, self._cpu_s = now_s, cpu_s
        is_due = now_s - self._at_s >= max(
            min(self.pause_s, _LOOK_S) if is_busy else _LOOK_IDLE_S, _TIMES_LOOK * self._took_s
        )
        if is_due:
            self._at_s = now_s
        return is_due

    def flooding(self, connections: Iterable[AcceptedSocket], now_s: float) -> list[AcceptedSocket]:
        """Return the connections that have sent too much that is in no message.

        connections: all that there are. What has arrived of each is compared when it is yielded.
        """
        seen, silent, silent_bytes = dict[str, tuple[AcceptedSocket, float]](), set[str](), Counter[str]()
        for found in connections:
            with self._lock:
                accounted = self._accounted.get(found.peer)
                if accounted:
                    self._accounted[found.peer] = 0.0
            last, unread = self._seen.get(found.peer, (replace(found, received=0, sent=0), 0.0))
            unread += found.received - last.received - (found.sent - last.sent) / _SENT_PER_UPDATE
            if accounted is None:
                silent.add(found.peer)
                silent_bytes[found.host] += int(unread)
            else:
                unread = max(unread - accounted, -_MOST_AHEAD)
            seen[found.peer] = found, unread
        self._seen = seen
        most = {peer: MOST_SILENT if peer in silent else MOST_UNREAD for peer in seen}
        hosts = {found.host for found, unread in seen.values() if unread > most[found.peer]}
        hosts |= {host for host, num_bytes in silent_bytes.items() if num_bytes > _MOST_SILENT_HOST}
        kept = {host: end_s for host, end_s in self._shut_out.items() if end_s > now_s and host not in hosts}
        kept |= dict.fromkeys(sorted(hosts), now_s + _SHUT_OUT_S)
        self._shut_out = dict(list(kept.items())[-_MOST_SHUT_OUT:])
        most |= {peer: _SHUT_OUT_BYTES for peer in silent if seen[peer][0].host in self._shut_out}
        may_begin = any(seen[peer][1] > _SHUT_OUT_BYTES for peer in silent)
        self.pause_s = _LOOK_AGAIN_S if may_begin else _LOOK_S if seen else _LOOK_ALONE_S
        return [found for found, unread in seen.values() if unread > most[found.peer]]

    def surplus(self) -> list[AcceptedSocket]:
        """Return those of the connections at the last look that are above the limit of their host.

        First those that have never sent a message, then those that were silent for longest.
        """
        found = [connection for connection, _ in self._seen.values()]
        left = Counter(connection.host for connection in found)
        if max(left.values(), default=0) <= self._most_per_host:
            return []
        with self._lock:
            latest = {peer: place for place, peer in enumerate(self._accounted)}
        ended = []
        for connection in sorted(found, key=lambda one: latest.get(one.peer, -1)):
            if left[connection.host] > self._most_per_host:
                left[connection.host] -= 1
                ended.append(connection)
        return ended


def accepted_sockets(port: int) -> Iterator[AcceptedSocket]:
    """Yield every connection that was made to `port`."""
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError), _copy_of(int(name)) as other:
            peer = _peer(other)
            if peer and other.getsockname()[1] == port:
                received, sent = _counts(other)
                yield AcceptedSocket(int(name), *peer, received, sent)


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield a copy of each socket that listens at `port`."""
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            other = _copy_of(int(name))
            is_internet = other.family in (socket.AF_INET, socket.AF_INET6)
            listens = is_internet and other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and other.getsockname()[1] == port:
                yield other
            else:
                other.close()


def _shut(connection: AcceptedSocket) -> bool:
    """End the connection if the descriptor still has the same peer; what has arrived is not read any more."""
    with suppress(OSError), _copy_of(connection.descriptor) as other:
        now = _peer(other)
        if now and now[1] == connection.peer:
            other.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                while other.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    pass
            return True
    return False


def _copy_of(descriptor: int) -> socket.socket:
    """Return a socket with a copy of the descriptor. Raises OSError if it is not that of a socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _peer(other: socket.socket) -> tuple[str, str] | None:
    """Return the other end's host, and its name as gRPC writes it; None if it is not an internet socket."""
    if other.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = other.getpeername()[:2]
    host = host.removeprefix("::ffff:")
    return host, f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


_COUNTS, _COUNTS_AT = struct.Struct("=2Q"), 120
"""`tcpi_bytes_acked` and `tcpi_bytes_received`, and their place in Linux's `struct tcp_info`."""


def _counts(other: socket.socket) -> tuple[int, int]:
    """Return the bytes that a connection has received, and those that its peer has acknowledged."""
    size = _COUNTS_AT + _COUNTS.size
    info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(info) < size:
        return 0, 0
    sent, received = _COUNTS.unpack_from(info, _COUNTS_AT)
    return received, sent


# --- hosts that make no new connection


_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NETWORK = 2**32 - 0x100000
"""Where a filter finds the header of IP."""
_V4_SOURCE, _V6_SOURCE = 12, 8
"""Places of the source's address in that header."""


def source_filter(hosts: Iterable[str]) -> bytes:
    """Return a filter of a socket (classic BPF) that drops the packets of these hosts.

    Of an IPv6 address the network of 64 bits counts, as a host there has 2^64 addresses.
    """
    code = []
    for host in hosts:
        if host in _LOCAL:
            continue
        source = ip_address(host.partition("%")[0]).packed
        words = [(_V6_SOURCE, source[:4]), (_V6_SOURCE + 4, source[4:8])]
        words = words if len(source) == 16 else [(_V4_SOURCE, source)]
        for i, (place, word) in enumerate(words):
            left = 2 * (len(words) - i) - 1  # to the next host
            code.append((_LOAD_WORD, 0, 0, _NETWORK + place))
            code.append((_IF_EQUAL, 0, left, int.from_bytes(word, "big")))
        code.append((_RETURN, 0, 0, 0))
    code.append((_RETURN, 0, 0, 2**32 - 1))
    return b"".join(_INSTRUCTION.pack(*one) for one in code)


def _attach(listener: socket.socket, program: bytes) -> None:
    """Let the kernel drop the first packets of connections that a filter drops; those that are open stay."""
    buffer = ctypes.create_string_buffer(program, len(program))
    code = struct.pack("HL", len(program) // _INSTRUCTION.size, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, code)
