"""Hand the units of a state to the snapshot that writes them, one at a time, while merges go on.

A snapshot is of one moment. A unit that is merged before it is written is in memory twice. So its merge
begins once it is written, and the units for which merges wait are written first.
"""

import threading
from collections.abc import Callable, Iterator

from aedit.async_sgd.hub import SavedUnit, Unit, save_unit


class Handover:
    """The units of a snapshot that are still to be written. Any thread may ask; one iterates."""

    def __init__(self, units: dict[int, Unit], written: Callable[[], None]) -> None:
        """Take the units of a frozen state. written: called whenever another unit is written."""
        self._units, self._written = units, written
        self._lock = threading.Lock()
        self._wanted: dict[int, None] = {}
        self._writing: int | None = None

    def may_advance(self, index: int) -> bool:
        """Return whether a unit may have a new version now; if not, it is written soon."""
        with self._lock:
            if index not in self._units and index != self._writing:
                return True
            self._wanted.setdefault(index)
            return False

    @property
    def held(self) -> frozenset[int]:
        """Return the units that were asked for and must not have a new version yet."""
        with self._lock:
            return frozenset(self._wanted)

    def __iter__(self) -> Iterator[SavedUnit]:
        """Yield every unit once; it counts as written when the next one is asked for."""
        while (unit := self._next()) is not None:
            yield unit
            del unit
            self._finish()

    def close(self) -> None:
        """Let all units have new versions: they are written, or will not be."""
        with self._lock:
            self._units.clear()
            self._wanted.clear()
            self._writing = None
        self._written()

    def _next(self) -> SavedUnit | None:
        with self._lock:
            index = next((i for i in self._wanted if i in self._units), next(iter(self._units), None))
            if index is None:
                return None
            self._writing, unit = index, self._units.pop(index)
        return save_unit(index, unit)

    def _finish(self) -> None:
        with self._lock:
            if self._writing is not None:
                self._wanted.pop(self._writing, None)
            self._writing = None
        self._written()
