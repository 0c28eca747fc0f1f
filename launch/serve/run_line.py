"""A server's two threads towards the hub: it announces the server, and follows the line `run`.

The server announces itself to the hub's directory every few seconds, which lists the other servers. The hub
says which version is the newest; any server or hub that has it sends its bytes.
"""

import logging
import random
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic

import grpc

from aedit.proto.rpc import ClientKeys, DirectoryClient, HubRefused, HubUnreachable, ServerCard, SigningKey
from aedit.proto.versions import Manifest, Receiving, VersionsClient
from aedit.spec_rollout.server import TrainerLines

RUN_LINE = "run"
WAIT_S = 10.0
"""Longest wait of a question for the newest version."""
PAUSE_S = 1.0
SERVER_TIMEOUT_S = 5.0
"""Seconds without a byte from another server, after which the next source is tried."""
HUB_TIMEOUT_S = 20.0
MAX_SERVERS = 2
"""Other servers that are tried before the hub."""
AVOID_S = 60.0
"""Time for which a source that has failed is not asked again, unless it is the hub."""

log = logging.getLogger(__name__)


class RunLine:
    """Fetches the versions of the line `run` in a thread, from `start` to `close`."""

    def __init__(
        self,
        hubs: Sequence[str],
        keys: ClientKeys,
        lines: TrainerLines,
        others: Callable[[], Iterable[ServerCard]],
        event: Callable[..., None],
    ) -> None:
        """Prepare to follow.

        Args:
            hubs: HOST:PORT of the hub, and of its standby if there is one.
            keys: Shown to hub and servers.
            lines: Takes what has arrived. The line is open there.
            others: Returns the cards of the other servers of the run.
            event: Records an event by name.
        """
        self._hubs = [VersionsClient(place, keys, call_timeout_s=HUB_TIMEOUT_S) for place in hubs]
        self._keys, self._lines, self._others, self._event = keys, lines, others, event
        self._avoided: dict[str, float] = {}
        self._servers: dict[str, VersionsClient] = {}
        self._receiving: Receiving | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run line", daemon=True)
        self.serial = 0
        """Newest version that is here."""
        self.error = ""
        """Why there is nothing newer; empty while the hub answers."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        self._closed.set()
        for client in (*self._hubs, *self._servers.values()):
            client.close()
        if self._thread.is_alive():
            self._thread.join(HUB_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                manifest = self._newest()
                if manifest is not None and manifest.serial > self.serial:
                    self._take(manifest)
                    continue
            except Exception:
                log.exception("the line of the run was not followed")
            self._closed.wait(PAUSE_S)

    def _newest(self) -> Manifest | None:
        """Return the newest manifest that a hub has, after a wait for one; None without one."""
        try:
            manifest = self._hubs[0].newest(RUN_LINE, after=self.serial, wait_s=WAIT_S)
        except (HubUnreachable, HubRefused, ValueError) as error:
            self.error = str(error)
            self._hubs.append(self._hubs.pop(0))
            return None
        self.error = ""
        return manifest

    def _take(self, manifest: Manifest) -> None:
        """Fetch a version from one source after another; what has arrived is kept in between."""
        began_s = monotonic()
        receiving = self._receive(manifest)
        for client in self._sources(manifest.serial):
            if not receiving.missing or self._closed.is_set():
                break
            try:
                client.fetch(receiving)
            except (HubUnreachable, HubRefused) as error:
                self.error = str(error)
                self._event(
                    "source_failed", version=manifest.serial, source=client.address, reason=str(error)
                )
        if receiving.missing:
            self._closed.wait(PAUSE_S)
            return
        receiving.finish()
        self._receiving, self.serial, self.error = None, manifest.serial, ""
        self._lines.arrived(manifest)
        seconds = round(monotonic() - began_s, 3)
        self._event("version", version=manifest.serial, bytes=manifest.num_bytes, seconds=seconds)

    def _receive(self, manifest: Manifest) -> Receiving:
        """Return what is there of this version, or a new beginning."""
        if self._receiving is None or self._receiving.manifest != manifest:
            if self._receiving is not None:
                self._receiving.abandon()
            self._receiving = Receiving(self._lines.store, manifest)
        return self._receiving

    def _sources(self, serial: int) -> list[VersionsClient]:
        """Return the hub after some of the other servers that say that they have the version.

        With n of them, one in n + 1 servers asks the hub first, so that its line is shared.
        """
        known = [card.address for card in self._others() if card.serial >= serial]
        places = [place for place in known if self._avoided.get(place, 0.0) < monotonic()]
        places = random.sample(places, random.randint(0, len(places)))[:MAX_SERVERS]
        for gone in self._servers.keys() - set(known):
            self._servers.pop(gone).close()
        for place in places:
            if place not in self._servers:
                self._servers[place] = VersionsClient(place, self._keys, call_timeout_s=SERVER_TIMEOUT_S)
        return [*(self._servers[place] for place in places), self._hubs[0]]


EVERY_S = 2.0
LEAVE_S = 5.0


class Announcer:
    """Announces a server in a thread, from `start` to `close`."""

    def __init__(
        self,
        directory: DirectoryClient,
        key: SigningKey,
        card: Callable[[], ServerCard],
        event: Callable[..., None],
    ) -> None:
        """Prepare to announce.

        Args:
            directory: Of the run.
            key: Signs the card.
            card: Returns the card as it is now, without run, process and key.
            event: Records an event by name.
        """
        self._directory, self._key, self._card, self._event = directory, key, card, event
        self._process = secrets.randbits(64) | 1
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announce", daemon=True)
        self._is_announced = False
        self.others: tuple[ServerCard, ...] = ()
        """The other servers of the run, as the hub last listed them."""
        self.over = threading.Event()
        """The run is finished, or this server may not serve it."""
        self.is_finished = False
        self.failure = ""
        """Why this server may not serve the run; empty if it may."""
        self.error = ""
        """Why the hub does not list this server now."""

    def first(self) -> None:
        """Announce for the first time.

        Raises HubRefused if the hub refuses, for example because the name is taken, and HubUnreachable.
        """
        self._announce()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Take the server out of the directory, if the hub answers, and end the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)
        with suppress(HubRefused, HubUnreachable):
            self._directory.withdraw(self._card().name, self._process)
        self._directory.close()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self._announce()
                name = self._card().name
                self.others = tuple(each for each in self._directory.servers() if each.name != name)
            except HubUnreachable as error:
                self._lost(str(error))
            except HubRefused as error:
                self._refused(error)
            except Exception:
                log.exception("the server was not announced")

    def _announce(self) -> None:
        card = self._card()
        card.process = self._process
        reply = self._directory.announce(card, self._key.private)
        if not self._is_announced:
            self._event("announced", address=card.address)
        self._is_announced, self.error = True, ""
        if reply.banned:
            self._end(reply.reason or "no reason was given")
        elif reply.finished:
            self.is_finished = True
            self.over.set()

    def _lost(self, reason: str) -> None:
        if self._is_announced:
            self._event("hub_lost", reason=reason)
        self._is_announced, self.error = False, reason

    def _refused(self, error: HubRefused) -> None:
        """End for a reason that stays; a hub that does not lead now, or restarts, is asked again."""
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.ALREADY_EXISTS):
            self._end(error.text)
        else:
            self._lost(error.text)

    def _end(self, reason: str) -> None:
        self.failure = reason
        self.over.set()
