"""Rollout servers of a run: the hub's list of them, and which addresses may be connected to now.

A thread asks for the list every few seconds.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aedit.child import Restarts
from aedit.proto.rpc import DirectoryClient, HubRefused, HubUnreachable, new_secret
from aedit.proto.rpc import directory_pb2 as pb

ABSENT_S = 30.0
"""Time for which a server is kept that the hub does not list. A hub that has just started lists none yet."""
CONNECT_PAUSES = Restarts(limit=10**9, pause_s=0.25, longest_pause_s=10.0)
"""Between two tries to connect to a server that is away."""


BAN_S = 60.0
"""After the first violation; each further one doubles it."""


MAX_DOUBLINGS = 6
"""Of the pause after samples that a server has not advanced in time."""


MAX_VIOLATIONS = 3
"""After so many the server gets no more samples of this process."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Place:
    """One address."""

    address: str
    name: str = ""
    """Name of its server, known from the directory or from the first connection."""
    public_key: bytes = b""
    """The same."""
    is_listed: bool = True
    is_open: bool = False
    """There is a connection, or a try."""
    error: str = ""
    """Why the last connection has ended or failed."""
    violations: int = 0
    stalls: int = 0
    """Times since its last finished sample that it did not advance samples, or return them, in time."""
    secret: str = field(default_factory=new_secret)
    """Shows the server that later connections are of the same author of policy versions."""
    _pauses: Restarts = CONNECT_PAUSES
    _banned_until_s: float = 0.0

    @property
    def is_banned(self) -> bool:
        """Return whether it is never connected to again."""
        return self.violations >= MAX_VIOLATIONS

    def may_open(self, now_s: float) -> bool:
        """Return whether a connection may be tried now."""
        due = self._pauses.may_start(now_s) and now_s >= self._banned_until_s
        return self.is_listed and not self.is_open and not self.is_banned and due

    def stalled(self, now_s: float, stalled_s: float) -> float:
        """Note that it did not advance samples, or return them, in time; return until when it gets none.

        The first pause is as long as the time that was spent; each further one is twice as long.
        """
        until_s = now_s + stalled_s * 2.0 ** min(self.stalls, MAX_DOUBLINGS)
        self._banned_until_s = max(self._banned_until_s, until_s)
        self.stalls += 1
        return until_s

    def closed(self, now_s: float, reason: str, *, worked: bool, violation: bool = False) -> None:
        """Note the end of a connection, or of a try."""
        self.is_open, self.error = False, reason
        self._pauses = self._pauses.died(now_s, worked=worked)
        if violation:
            self._banned_until_s = now_s + BAN_S * 2**self.violations
            self.violations += 1


class ServerDiscovery:
    """Asks a directory for the servers again and again."""

    def __init__(
        self,
        client: DirectoryClient,
        every_s: float,
        listed: Callable[[Mapping[str, tuple[str, bytes]]], None],
        clock: Callable[[], float],
    ) -> None:
        """Start to ask every `every_s`. listed: called with names and public keys by address."""
        self._client, self._every_s, self._listed, self._clock = client, every_s, listed, clock
        self._seen: dict[str, tuple[tuple[str, bytes], float]] = {}
        """Servers by address, and when they were listed last."""
        self._closed = threading.Event()
        self._error = ""
        threading.Thread(target=self._work, name="directory", daemon=True).start()

    def accuse(self, accusation: pb.Accusation) -> None:
        """Report a server to the hub, in a thread of its own."""
        threading.Thread(target=self._accuse, args=(accusation,), name="accuse", daemon=True).start()

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._client.close()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                cards = self._client.servers()
            except (HubUnreachable, HubRefused) as error:
                if str(error) != self._error:
                    log.warning("the list of rollout servers: %s", error)
                self._error = str(error)
            else:
                self._error = ""
                now_s = self._clock()
                self._seen |= {card.address: ((card.name, card.public_key), now_s) for card in cards}
                self._seen = {a: each for a, each in self._seen.items() if now_s - each[1] <= ABSENT_S}
                self._listed({address: server for address, (server, _) in self._seen.items()})
            self._closed.wait(self._every_s)

    def _accuse(self, accusation: pb.Accusation) -> None:
        try:
            banned = self._client.accuse(accusation)
        except (HubUnreachable, HubRefused) as error:
            log.warning("the accusation of %s: %s", accusation.server, error)
        else:
            log.warning("accused %s: %s%s", accusation.server, accusation.reason, "; banned" * banned)
