"""`replicas.json`: the addresses of the replicas of each part. A peer writes it for the processes here.

{"parts": [{"replicas": ["10.0.0.1:7001", "10.0.0.2:7001"], "owner": "10.0.0.1:7001", "first": "",
            "least": 2}, ...]}
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aedit.system import write_atomically

REPLICAS = "replicas.json"


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """Addresses (HOST:PORT) of the replicas of one part."""

    replicas: tuple[str, ...] = ()
    """All that are known, those first that should keep the part."""
    owner: str = ""
    """The one that leads; empty while none is known."""
    first: str = ""
    """The one that should lead: an owner that is another hands the part over to it. Empty: no wish."""
    least: int = 1
    """Replicas, the owner included, that must have a push on disk before it is acknowledged: most of the
    copies that are wanted, or all peers where there are fewer."""


class ReplicasFile:
    """The file as one process reads or writes it. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._mark: tuple[int, int, int] | None = None
        self._parts: tuple[PartPlaces, ...] = ()

    def write(self, parts: Sequence[PartPlaces]) -> None:
        """Write the places of each part, if they have changed. Raises OSError."""
        with self._lock:
            if tuple(parts) != self._parts:
                write_atomically(self.path, json.dumps({"parts": [asdict(part) for part in parts]}))
                self._parts, self._mark = tuple(parts), None

    def parts(self) -> tuple[PartPlaces, ...]:
        """Return the places of each part as the file has them now; () while there is none."""
        with self._lock:
            try:
                found = self.path.stat()
                mark = (found.st_mtime_ns, found.st_size, found.st_ino)
                if mark != self._mark:
                    self._parts = _parts(self.path.read_text(encoding="utf-8"))
                    self._mark = mark
            except FileNotFoundError:
                self._parts, self._mark = (), None
            return self._parts

    def part(self, number: int) -> PartPlaces:
        """Return the places of one part; without any while they are not known."""
        parts = self.parts()
        return parts[number] if number < len(parts) else PartPlaces()


def _parts(text: str) -> tuple[PartPlaces, ...]:
    return tuple(
        PartPlaces(tuple(part["replicas"]), part["owner"], part["first"], part["least"])
        for part in json.loads(text)["parts"]
    )
