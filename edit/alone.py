"""Answers and notes of a node that needs nobody for them."""

from collections.abc import Callable
from typing import TypeVar

from aedit.proto.transports import Pending

T = TypeVar("T")


class Here(Pending[T]):
    """An answer that needs nobody."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> T:
        """Return the answer."""
        return self._make()


class OwnNotes:
    """Notes of a node that agrees with nobody."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Keep the first text under a key."""
        self._notes.setdefault(key, text)

    def read(self, key: str) -> str | None:
        """Return the text under `key`, or None."""
        return self._notes.get(key)
