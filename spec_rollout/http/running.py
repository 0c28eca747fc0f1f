"""Requests that are being served, by the ids that their clients have given."""

from collections.abc import Iterable
from typing import Protocol


class Abortable(Protocol):
    """A request whose samples can be ended."""

    def abort(self) -> None:
        """End its samples."""


class Running:
    """The requests with an id. Used by the event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[Abortable]] = {}

    def add(self, request_id: str, request: Abortable) -> None:
        """Add a request; one without an id cannot be named, and is not kept."""
        if request_id:
            self._by_id.setdefault(request_id, set()).add(request)

    def remove(self, request_id: str, request: Abortable) -> None:
        """Remove a request. Idempotent."""
        requests = self._by_id.get(request_id, set())
        requests.discard(request)
        if not requests:
            self._by_id.pop(request_id, None)

    def abort(self, request_ids: Iterable[str]) -> int:
        """End the samples of all requests with these ids; return the number of requests."""
        found = [request for name in set(request_ids) for request in self._by_id.get(name, ())]
        for request in found:
            request.abort()
        return len(found)
