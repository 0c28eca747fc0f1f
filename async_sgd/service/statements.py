"""Statements of the owner of a part about the anchors that it gives, signed once for each version."""

import threading
from collections import OrderedDict
from dataclasses import replace

from aedit.proto.rpc import SigningKey, Statement, signed

_KEPT = 16
"""Newest statements of each unit that are kept."""


class TwoValues(Exception):
    """One version has two values in the memory of this hub, which cannot be trusted any more."""


class Signer:
    """Signs for one hub process. Any thread may call."""

    def __init__(self, key: SigningKey, run: str, part: int) -> None:
        self._key, self._run, self._part = key, run, part
        self._lock = threading.Lock()
        self._made: dict[int, OrderedDict[Statement, tuple[bytes, bytes]]] = {}
        """Digest and statement of what was signed, by unit."""

    def statement(self, lineage: str, term: int, unit: int, version: int, digest: bytes) -> bytes:
        """Return the signed statement that a version has this SHA-256.

        Raises:
            TwoValues: This process has signed another value of that version.
        """
        place = Statement(
            run=self._run,
            part=self._part,
            public_key=self._key.public,
            lineage=lineage,
            term=term,
            unit=unit,
            version=version,
        )
        with self._lock:
            made = self._made.setdefault(unit, OrderedDict())
            if place not in made:
                made[place] = digest, signed(replace(place, sha256=digest), self._key)
                while len(made) > _KEPT:
                    made.popitem(last=False)
            known, data = made[place]
        if known != digest:
            raise TwoValues(f"{place.described()} has two values in the memory of this hub")
        return data
