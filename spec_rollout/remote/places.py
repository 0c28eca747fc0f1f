"""Addresses of rollout servers: which of them may be connected to now."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aedit.proto.rpc import new_secret
from aedit.spec_rollout.training import Restarts

PAUSES = Restarts(limit=10**9, pause_s=0.25, longest_pause_s=10.0)
"""Between two tries to connect to a server that is away."""
BAN_S = 60.0
"""After the first violation; each further one doubles it."""
MAX_DOUBLINGS = 6
"""Of the pause after samples that a server has not advanced in time."""
MAX_VIOLATIONS = 3
"""After so many the server gets no more samples of this process."""


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
    _pauses: Restarts = PAUSES
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


@dataclass(slots=True)
class Places:
    """The addresses that were ever listed."""

    places: dict[str, Place] = field(default_factory=dict)

    def list(self, found: Iterable[str] | Mapping[str, tuple[str, bytes]]) -> None:
        """Replace the list of servers: addresses, or names and public keys by address."""
        for place in self.places.values():
            place.is_listed = False
        known = found if isinstance(found, Mapping) else dict.fromkeys(found, ("", b""))
        for address, (name, public_key) in known.items():
            place = self.places.setdefault(address, Place(address))
            place.is_listed = True
            if name:
                place.name, place.public_key = name, public_key

    def due(self, now_s: float) -> Iterable[Place]:
        """Return the places to which a connection may be tried now."""
        return [place for place in self.places.values() if place.may_open(now_s)]
