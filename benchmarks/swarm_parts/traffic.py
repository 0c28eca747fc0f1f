"""Bytes between the peers of a run on this machine, by the kernel's counters of their TCP connections."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

_PEER = re.compile(r"\blocal-(\d+)\b")
"""Mark of a peer's number in the command line of its processes, or of one that has started them."""
_ROW = re.compile(r"^\S+\s+\d+\s+\d+\s+(?P<local>\S+)\s+(?P<remote>\S+).*?pid=(?P<pid>\d+)")
_SENT, _AGAIN = re.compile(r"\bbytes_sent:(\d+)"), re.compile(r"\bbytes_retrans:(\d+)")
_LOOK_S = 0.5
_COMMAND = ("ss", "-tinpHO")


def why_not() -> str | None:
    """Return why bytes cannot be counted here; None if they can."""
    return None if shutil.which("ss") else "needs the command `ss` (iproute2)"


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection."""

    local: str
    remote: str
    pid: int
    sent: int
    """Bytes that this end has sent, without those that were sent again."""


def parsed(text: str) -> list[Connection]:
    """Return the connections in the output of `ss -tinpHO`. Those that have sent nothing have no counter."""
    found = []
    for line in text.splitlines():
        if row := _ROW.match(line):
            sent = _number(_SENT, line) - _number(_AGAIN, line)
            found.append(Connection(row["local"], row["remote"], int(row["pid"]), sent))
    return found


def _number(pattern: re.Pattern[str], line: str) -> int:
    found = pattern.search(line)
    return int(found[1]) if found else 0


class Traffic:
    """Counts bytes between peers until the block ends. What is sent within one peer does not count."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}
        """Peer that has sent, and bytes so far, by connection."""
        self._peers: dict[int, int | None] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def take(self, connections: Iterable[Connection]) -> None:
        """Note the connections that are open now."""
        known = [(one, peer) for one in connections if (peer := self._peer(one.pid)) is not None]
        ends = {one.local: peer for one, peer in known}
        for one, peer in known:
            other = ends.get(one.remote)
            if other is not None and other != peer:
                self._sent[one.local, one.remote] = (peer, one.sent)

    def per_peer(self, peers: int) -> list[int]:
        """Return the bytes that each peer has sent to others."""
        return [sum(sent for peer, sent in self._sent.values() if peer == i) for i in range(peers)]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(subprocess.TimeoutExpired):  # the next look has what this one would have seen
                self.take(parsed(subprocess.run(_COMMAND, capture_output=True, text=True, timeout=30).stdout))

    def _peer(self, pid: int) -> int | None:
        if pid not in self._peers:
            self._peers[pid] = peer_of(pid)
        return self._peers[pid]


def peer_of(pid: int) -> int | None:
    """Return the number of the peer to which a process belongs.

    None if to none, or to one that others have started: their runs have peers of the same names.
    """
    found: re.Match[str] | None = None
    try:
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None and process.pid != os.getpid():
            found = found or _PEER.search(" ".join(process.cmdline()))
            process = process.parent()
    except psutil.Error:
        return None
    return int(found[1]) if found and process is not None else None
