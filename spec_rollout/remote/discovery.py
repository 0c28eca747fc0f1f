"""The list of servers of a run, asked for every few seconds in a thread of its own."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from aedit.proto.rpc import DirectoryClient, HubRefused, HubUnreachable
from aedit.proto.rpc import directory_pb2 as pb

ABSENT_S = 30.0
"""Time for which a server is kept that the hub does not list. A hub that has just started lists none yet."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """Servers by address: name and public key."""

    servers: dict[str, tuple[str, bytes]]


@dataclass(slots=True)
class Absences:
    """Keeps servers listed for a while after they were left out."""

    _seen: dict[str, tuple[tuple[str, bytes], float]] = field(default_factory=dict)

    def merged(self, found: dict[str, tuple[str, bytes]], now_s: float) -> dict[str, tuple[str, bytes]]:
        """Return the servers that are listed now, or were within `ABSENT_S`."""
        self._seen |= {address: (server, now_s) for address, server in found.items()}
        self._seen = {a: each for a, each in self._seen.items() if now_s - each[1] <= ABSENT_S}
        return {address: server for address, (server, _) in self._seen.items()}


class ServerDiscovery:
    """Asks a directory for the servers, and posts the answers."""

    def __init__(
        self,
        client: DirectoryClient,
        every_s: float,
        post: Callable[[Listed], None],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._every_s, self._post, self._clock = client, every_s, post, clock
        self._absences = Absences()
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
                found = {card.address: (card.name, card.public_key) for card in cards}
                self._post(Listed(self._absences.merged(found, self._clock())))
            self._closed.wait(self._every_s)

    def _accuse(self, accusation: pb.Accusation) -> None:
        try:
            banned = self._client.accuse(accusation)
        except (HubUnreachable, HubRefused) as error:
            log.warning("the accusation of %s: %s", accusation.server, error)
        else:
            log.warning("accused %s: %s%s", accusation.server, accusation.reason, "; banned" * banned)
