"""Confirms to the leading hub what this follower has on disk, unless its peer is about to give it up."""

import logging
import threading
import time
from collections.abc import Callable

from aedit.async_sgd.journal import Mirror
from aedit.async_sgd.service import Leadership
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.records import resting_file
from aedit.proto.rpc import HubClient, HubRefused, HubUnreachable
from aedit.proto.rpc import hub_pb2 as pb

log = logging.getLogger(__name__)

_CONFIRM_S = 0.5
"""Longest time between two confirmations to the leading hub."""
_SOON_S = 0.02
"""Pause of a follower that may confirm nothing now."""


class Arrivals:
    """Signals that another chunk of the journal has come."""

    def __init__(self) -> None:
        self._arrived, self.num = threading.Condition(), 0

    def note(self) -> None:
        """Note another one."""
        with self._arrived:
            self.num += 1
            self._arrived.notify_all()

    def wait(self, seen: int) -> None:
        """Return when more than `seen` have come, or at the time of the next confirmation."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.num != seen, _CONFIRM_S)


class Confirmer:
    """The confirmations of one follower.

    A replica that its peer may give up *rests*: it confirms nothing, so that the owner cannot count on it
    from then on. Once the journal counts on it all the same, it confirms again.
    """

    def __init__(
        self, mirror: Mirror, leadership: Leadership, endpoint: HubEndpoint, arrivals: Arrivals
    ) -> None:
        """Confirm nothing yet."""
        self._mirror, self._leadership, self._endpoint = mirror, leadership, endpoint
        self._arrivals, self._last_s = arrivals, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Return the seconds since it last confirmed anything, or was made."""
        return time.monotonic() - self._last_s

    @property
    def is_needed(self) -> bool:
        """Return whether a configuration that counts in the journal, as far as applied, names this one."""
        with self._mirror.lock:
            configs = self._mirror.hub.state.configs
            return any(self._leadership.identity in config.replicas for config in configs)

    def run(
        self,
        following: Callable[[], tuple[int, HubClient | None]],
        stopping: threading.Event,
        invited: Callable[[], None],
    ) -> None:
        """Confirm until `stopping` is set.

        Args:
            following: Returns the term of the leader that is followed, 0 without one, and its client.
            stopping: Ends it.
            invited: Called when the leader wants this replica to lead in its place.
        """
        confirmed = (0, 0)
        while not stopping.is_set():
            seen, term = self._arrivals.num, following()[0]
            if self._mirror.position == confirmed or not term:
                self._arrivals.wait(seen)
            term, client = following()
            if not term or client is None or not self._leadership.may_confirm(term) or self._rests():
                stopping.wait(_SOON_S)
                continue
            confirmed = self._mirror.sync()
            try:
                if not stopping.is_set() and self._confirm(client, term, confirmed).stand:
                    invited()
            except (HubUnreachable, HubRefused) as error:
                log.warning("confirming: %s", error)
                confirmed = (0, 0)
                stopping.wait(_SOON_S)

    def _confirm(self, client: HubClient, term: int, position: tuple[int, int]) -> pb.ConfirmReply:
        self._last_s = time.monotonic()
        request = pb.ConfirmRequest(
            term=term,
            segment=position[0],
            offset=position[1],
            replica=self._leadership.identity,
            address=self._endpoint.own_address,
        )
        try:
            return client.confirm(request, timeout_s=1.0)
        finally:
            self._last_s = time.monotonic()

    def _rests(self) -> bool:
        return resting_file(self._endpoint.directory).exists() and not self.is_needed
