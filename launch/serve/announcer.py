"""Tells the hub's directory every few seconds that this server is there, and reads the other servers."""

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress

import grpc

from aedit.proto.rpc import DirectoryClient, HubRefused, HubUnreachable, ServerCard, SigningKey

EVERY_S = 2.0
LEAVE_S = 5.0

log = logging.getLogger(__name__)


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
        self._is_told = False
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
        if not self._is_told:
            self._event("announced", address=card.address)
        self._is_told, self.error = True, ""
        if reply.banned:
            self._end(reply.reason or "no reason was given")
        elif reply.finished:
            self.is_finished = True
            self.over.set()

    def _lost(self, reason: str) -> None:
        if self._is_told:
            self._event("hub_lost", reason=reason)
        self._is_told, self.error = False, reason

    def _refused(self, error: HubRefused) -> None:
        """End for a reason that stays; a hub that does not lead now, or restarts, is asked again."""
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.ALREADY_EXISTS):
            self._end(error.text)
        else:
            self._lost(error.text)

    def _end(self, reason: str) -> None:
        self.failure = reason
        self.over.set()
