"""Connections of a server: how many it takes, and how many of one host.

gRPC accepts whoever comes and tells nobody. The sockets are found among the descriptors of this process.
"""

import os
import resource
import socket
import threading
from collections import Counter, OrderedDict
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"
_MOST_DESCRIPTORS = 2**16
_RESERVED = 256
"""Descriptors for the journal and everything else but connections."""
_REMEMBERED = 8192


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


class Connections:
    """Ends connections of a host that has more than `most_per_host`. Does nothing where there is no /proc."""

    def __init__(self, most_per_host: int) -> None:
        self._most_per_host = most_per_host
        self._lock = threading.Lock()
        self._heard: OrderedDict[str, None] = OrderedDict()

    def heard(self, peer: str) -> None:
        """Note that a message of this peer, as gRPC writes it, has arrived."""
        with self._lock:
            self._heard[peer] = None
            self._heard.move_to_end(peer)
            if len(self._heard) > _REMEMBERED:
                self._heard.popitem(last=False)

    def cut(self, port: int) -> int:
        """End the surplus connections to `port`, and return how many.

        First those that have never sent a message, then those that were silent for longest.
        """
        if not os.path.isdir(_DESCRIPTORS) or len(os.listdir(_DESCRIPTORS)) <= self._most_per_host:
            return 0
        found = _accepted(port)
        with self._lock:
            latest = {peer: place for place, peer in enumerate(self._heard)}
        surplus = Counter(host for host, _ in found.values())
        count = 0
        for descriptor, (host, peer) in sorted(found.items(), key=lambda item: latest.get(item[1][1], -1)):
            if surplus[host] > self._most_per_host:
                surplus[host] -= 1
                count += _shut(descriptor, peer)
        return count


def _accepted(port: int) -> dict[int, tuple[str, str]]:
    """Return by descriptor the host and the peer of every connection that was made to `port`."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError), _copy_of(int(name)) as other:
            peer = _peer(other)
            if peer and other.getsockname()[1] == port:
                found[int(name)] = peer
    return found


def _shut(descriptor: int, peer: str) -> bool:
    """End the connection if the descriptor still has the same peer."""
    with suppress(OSError), _copy_of(descriptor) as other:
        now = _peer(other)
        if now and now[1] == peer:
            other.shutdown(socket.SHUT_RDWR)
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
