"""The directory of rollout servers: who serves, who was accused, who is banned.

Like the hub's state machine it has no clock, files or network. Only bans are journaled: a server announces
itself again to a hub that comes back. A server is no member of the run: it counts for no quorum and holds no
leases.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aedit.async_sgd.hub.decide_join import LONGEST_NAME
from aedit.async_sgd.hub.state import Denied, HubState
from aedit.async_sgd.rules import Banned
from aedit.types import address_fault

KEY_BYTES = 32
"""Length of an Ed25519 public key."""
_LONGEST_STATE = 64
_MOST_FIGURES = 16
_LONGEST_FIGURE = 32
_MOST_ROWS = 2**20
_MOST_TOKENS_PER_S = 1e9
_MOST_SECONDS = 1e10
_MOST_FIGURE = 1e18
_FIGURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./ -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """State of one rollout server, as it announces itself."""

    name: str
    address: str
    """HOST:PORT of its services."""
    process: int
    """Drawn by its process at the start, and told to nobody but the hub."""
    public_key: bytes
    """Ed25519; what it signs its rollouts with."""
    rows: int = 0
    tokens_per_s: float = 0.0
    serial: int = 0
    """Version of the run's policy that it has."""
    running: int = 0
    waiting: int = 0
    state: str = "starting"
    """For people: starting, serving, training a drafter, leaving."""
    idle_s: float = 0.0
    idle_used_s: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


def check_server_card(card: Card, newest: int) -> None:
    """Raise Denied for the first value that cannot be true. newest: version of the run's policy."""
    if not card.name or len(card.name) > LONGEST_NAME or not card.name.isprintable():
        raise _wrong(f"a server's name has 1 to {LONGEST_NAME} printable characters")
    if fault := address_fault(card.address):
        raise _wrong(fault)
    if len(card.public_key) != KEY_BYTES:
        raise _wrong(f"public_key has {len(card.public_key)} bytes; an Ed25519 key has {KEY_BYTES}")
    if card.process == 0:
        raise _wrong("process is 0: a server's process draws a random number at its start")
    if len(card.state) > _LONGEST_STATE or not card.state.isprintable():
        raise _wrong(f"state has at most {_LONGEST_STATE} printable characters")
    if card.rows > _MOST_ROWS:
        raise _wrong(f"rows is {card.rows}; at most {_MOST_ROWS} are possible")
    _check_number("tokens_per_s", card.tokens_per_s, _MOST_TOKENS_PER_S)
    _check_number("idle_s", card.idle_s, _MOST_SECONDS)
    _check_number("idle_used_s", card.idle_used_s, _MOST_SECONDS)
    if card.serial > newest:
        raise _wrong(f"serial is {card.serial}; the newest version of this run is {newest}")
    _check_figures(card.figures)


def _check_number(name: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise _wrong(f"{name} is {value:g}; it must be in [0, {most:g}]")


def _check_figures(figures: Mapping[str, float]) -> None:
    if len(figures) > _MOST_FIGURES:
        raise _wrong(f"there are {len(figures)} figures; at most {_MOST_FIGURES} are taken")
    for name, value in figures.items():
        if len(name) > _LONGEST_FIGURE or not _FIGURE.fullmatch(name):
            raise _wrong(f"figure {name[:64]!r}: a name has 1 to {_LONGEST_FIGURE} letters, digits or _./-")
        if not abs(value) <= _MOST_FIGURE:  # also false for NaN
            raise _wrong(f"figure {name} is {value:g}; it must be within {_MOST_FIGURE:g} of 0")


def _wrong(reason: str) -> Denied:
    return Denied("different", reason)


_MOST_SHOWN = 64
"""Accused servers whose evidence `status` shows, the latest ones: it must fit into one message."""


@dataclass(slots=True)
class Entry:
    """One server, from its first announcement on; it stays on the list for a while when it is gone."""

    card: Card
    seen_s: float
    until_s: float
    """End of its lease."""
    gone: str = ""
    """Why it is not counted on any more."""

    def lives(self, now: float) -> bool:
        """Return whether its lease has not ended."""
        return not self.gone and now < self.until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Accusation of a server by a training node."""

    server: str
    public_key: bytes
    node: int
    reason: str
    evidence: dict[str, Any]


@dataclass(slots=True)
class Record:
    """Accusations of one server: of a name and a key."""

    counts: dict[int, int] = field(default_factory=dict)
    """Number of accusations by node."""
    last: Complaint | None = None


class Directory:
    """Servers of a run by name. One call at a time; times are those of any monotonic clock, in seconds."""

    def __init__(self, state: HubState, *, most: int, lease_s: float) -> None:
        """Create an empty directory.

        state: of the hub; its members and bans are read. most: servers that may live at a time.
        """
        self.lease_s = lease_s
        self._state, self._most = state, most
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._records: OrderedDict[tuple[str, bytes], Record] = OrderedDict()

    def announce(self, card: Card, now: float, *, certified: bool = False) -> tuple[bool, Banned | None]:
        """Register a server or renew its lease; return whether it is new, and its ban if there is one.

        certified: whether a certificate shows that the name is its own. That it has the key of its card was
        checked before. Raises Denied for a card that cannot be true, for a name or key that another server
        holds until its lease ends, and if there are too many servers.
        """
        check_server_card(card, self._state.policy_version)
        before = self._entries.get(card.name)
        lives = before is not None and before.lives(now)
        if (ban := self._state.ban_of(card.name, card.public_key)) is not None:
            return False, ban
        if lives and before is not None and before.card.public_key != card.public_key and not certified:
            left_s = before.until_s - now
            raise Denied("taken", f"another server is named {card.name!r}; its lease ends in {left_s:.0f} s")
        self._check_key(card, now)
        if not lives and len(self.live(now)) >= self._most:
            raise Denied("full", f"this hub lists {self._most} servers (hub.limits.servers)")
        is_new = not lives or before is None or before.card.process != card.process
        self._entries[card.name] = Entry(card, now, now + self.lease_s)
        self._entries.move_to_end(card.name)
        self._records.setdefault((card.name, card.public_key), Record())
        self._forget(now)
        return is_new, None

    def withdraw(self, name: str, process: int) -> bool:
        """Take out a server that ends; return whether it was there. Raises Denied for another process."""
        entry = self._entries.get(name)
        if entry is None or entry.gone:
            return False
        if entry.card.process != process:
            raise Denied("foreign", f"another process is the server {name!r}")
        entry.gone = "left"
        return True

    def live(self, now: float) -> list[Card]:
        """Return the servers whose leases have not ended and that are not banned, by name."""
        cards = [entry.card for _, entry in sorted(self._entries.items()) if entry.lives(now)]
        return [card for card in cards if self._state.ban_of(card.name, card.public_key) is None]

    def accuse(self, complaint: Complaint, elapsed_s: float) -> list[Banned]:
        """Count an accusation; return Banned once more than half of the live training nodes made one.

        Raises Denied for a server that was never announced, or had another key.
        """
        record = self._records.get((complaint.server, complaint.public_key))
        if record is None:
            raise Denied("unknown", f"no server {complaint.server[:64]!r} with this key is in the directory")
        record.counts[complaint.node] = record.counts.get(complaint.node, 0) + 1
        record.last = complaint
        self._records.move_to_end((complaint.server, complaint.public_key))
        voters = self._state.live.keys() & record.counts.keys()
        if 2 * len(voters) <= len(self._state.live):
            return []
        key = complaint.public_key.hex()
        if any(ban.server == complaint.server and ban.public_key == key for ban in self._state.banned):
            return []
        nodes = ", ".join(self._state.members[node].name for node in sorted(voters)[:4])
        reason = f"accused by {len(voters)} of {len(self._state.live)} nodes ({nodes}): {complaint.reason}"
        return [Banned(complaint.server, key, reason, elapsed_s)]

    def expire(self, now: float) -> list[str]:
        """Note which servers have fallen silent; return the names of those that just did."""
        silent = [name for name, e in self._entries.items() if not e.gone and now >= e.until_s]
        for name in silent:
            self._entries[name].gone = f"silent for {self.lease_s:g} s"
        return silent

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return everything that the views show of each server, as values that JSON can hold."""
        known = sorted(self._entries.items())
        shown = [key for key, record in self._records.items() if record.last][-_MOST_SHOWN:]
        return [self._server(entry, now, shown) for _, entry in known]

    def _server(self, entry: Entry, now: float, shown: list[tuple[str, bytes]]) -> dict[str, Any]:
        card, key = entry.card, (entry.card.name, entry.card.public_key)
        ban, record = self._state.ban_of(*key), self._records.get(key, Record())
        last = record.last
        names = {node: self._state.members[node].name for node in record.counts}
        return {
            "name": card.name,
            "role": "rollout",
            "address": card.address,
            "public_key": card.public_key.hex(),
            "state": _state(entry, ban, now),
            "live": entry.lives(now) and ban is None,
            "has_lease": entry.lives(now),
            "silent_s": now - entry.seen_s,
            "serial": card.serial,
            "lag": max(0, self._state.policy_version - card.serial),
            "rows": card.rows,
            "tokens_per_s": card.tokens_per_s,
            "running": card.running,
            "waiting": card.waiting,
            "idle_s": card.idle_s,
            "idle_used_s": card.idle_used_s,
            "figures": dict(card.figures),
            "accused": {names[node]: count for node, count in sorted(record.counts.items())},
            "reason": last.reason if last else "",
            "evidence": last.evidence if last and key in shown else None,
            "banned": ban.reason if ban else "",
        }

    def _check_key(self, card: Card, now: float) -> None:
        for name, entry in self._entries.items():
            if name != card.name and entry.card.public_key == card.public_key and entry.lives(now):
                raise Denied("taken", f"the server {name!r} has this public key: each server needs its own")

    def _forget(self, now: float) -> None:
        """Keep no more servers that are gone, and no more accusations, than servers that may live."""
        gone = [name for name, entry in self._entries.items() if not entry.lives(now)]
        for name in gone[: max(0, len(gone) - self._most)]:
            del self._entries[name]
        held = {(e.card.name, e.card.public_key) for e in self._entries.values()}
        spare = [key for key in self._records if key not in held]
        blank = [key for key in spare if not self._records[key].counts]
        accused = [key for key in spare if self._records[key].counts]
        for keys in (blank, accused):  # empty ones must not push out accusations
            for key in keys[: max(0, len(keys) - self._most)]:
                del self._records[key]


def _state(entry: Entry, ban: Banned | None, now: float) -> str:
    if ban is not None:
        return "banned"
    if entry.gone:
        return f"gone: {entry.gone}"
    return entry.card.state if entry.lives(now) else "gone: silent"
