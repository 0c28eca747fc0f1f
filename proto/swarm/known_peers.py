"""The peers that are known: the newest valid card of each key, and which of them count.

A peer counts once `confirm` was called for its key, until its lease has passed. A lease begins when its
serial is first seen here, on the caller's monotonic clock, so that no other clock matters and a replayed
card keeps no peer alive. After the lease the key has to be confirmed again.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from aedit.proto.swarm.card import PeerCard, decoded_card, parsed_card
from aedit.proto.swarm.statements import Contradiction, contradiction
from aedit.types import printable

KEY_PREFIX = 16
"""Bytes of a key by which a caller says which cards it knows."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Result of an offered card."""

    kind: Literal["new", "newer", "known", "own", "refused"]
    """new: of a key that is not confirmed. known: not newer than the card that is known."""
    card: PeerCard | None = None
    """The newest known card of the same key; None if the offered one was refused."""
    reason: str = ""
    """Why it was refused."""


@dataclass(slots=True)
class _Entry:
    data: bytes
    card: PeerCard
    seen_s: float
    confirmed: bool = False
    certificate: str = ""
    """Fingerprint of the certificate that its peer has shown to have, when it was confirmed."""


class KnownPeers:
    """The newest valid card of each key. Any thread may call.

    `now` is a monotonic time in seconds; one that is earlier than that of a former call counts as that one.
    """

    def __init__(self, run: str, own_key: bytes, *, allow: Collection[bytes] = (), limit: int = 1024) -> None:
        """Start empty.

        Args:
            run: Name of the run; cards of other runs are refused.
            own_key: Public key of this peer.
            allow: Public keys of the peers that may take part; empty: those of all.
            limit: Most peers that count at a time. Twice as many cards are remembered.
        """
        self._run, self._own_key = run, own_key
        self._allow, self._limit = frozenset(allow), limit
        self._lock = threading.Lock()
        self._now_s = float("-inf")
        self._own: _Entry | None = None
        self._peers: OrderedDict[bytes, _Entry] = OrderedDict()
        """Confirmed or not; the one that has changed least recently is first."""
        self._faults: OrderedDict[bytes, Contradiction] = OrderedDict()
        self._own_serial = 0
        self._own_fault = ""

    @property
    def run(self) -> str:
        """Return the name of the run."""
        return self._run

    @property
    def own_key(self) -> bytes:
        """Return the public key of this peer."""
        return self._own_key

    @property
    def own_serial(self) -> int:
        """Return the highest serial seen with this peer's own key; the next card needs a higher one."""
        with self._lock:
            return self._own_serial

    @property
    def own_card(self) -> bytes:
        """Return the current card of this peer; empty before the first one."""
        with self._lock:
            return self._own.data if self._own else b""

    @property
    def faults(self) -> Mapping[bytes, Contradiction]:
        """Return the keys that are shut out, with the proof."""
        with self._lock:
            return dict(self._faults)

    @property
    def state(self) -> str:
        """Return as text what is wrong with this peer's own key; "" if nothing is."""
        with self._lock:
            return self._own_fault

    def allows(self, key: bytes) -> bool:
        """Return whether the peer with this key may take part."""
        with self._lock:
            return (not self._allow or key in self._allow) and key not in self._faults

    def renew(self, data: bytes, now: float) -> None:
        """Set this peer's own card.

        Raises:
            ValueError: It is invalid, or of another key or run, or not newer than the last one.
        """
        with self._lock:
            if self._own and data == self._own.data:
                return
        card = decoded_card(data)
        if card.public_key != self._own_key or card.run != self._run:
            raise ValueError(f"own card: it is of run {card.run!r}, or of a key that is not this peer's")
        with self._lock:
            if self._own and card.serial <= self._own.card.serial:
                least = self._own.card.serial + 1
                raise ValueError(f"own card: serial is {card.serial}; it must be at least {least}")
            self._own_serial = max(self._own_serial, card.serial)
            self._own = _Entry(data, card, self._at(now), confirmed=True)

    def offer(self, data: bytes, now: float) -> Offer:
        """Take a card of any peer, from any sender, and return what it was."""
        try:
            if known := self._as_known(data):
                return Offer("known", known)
            card = decoded_card(data)
        except ValueError as error:
            return Offer("refused", reason=str(error))
        if card.run != self._run:
            return Offer("refused", reason=f"run is {card.run!r}; this peer is in {self._run!r}")
        with self._lock:
            return self._taken(card, data, self._at(now))

    def contradict(self, one: bytes, other: bytes, now: float) -> bool:
        """Take what a peer shows as proof against a key; return whether it proves it.

        A proof against a key that is not known here is ignored.
        """
        found = contradiction(one, other)
        if found is None or found.run != self._run:
            return False
        with self._lock:
            if found.public_key == self._own_key:
                self._own_fault = f"others have proof against this peer's key: {found.reason}"
            if found.public_key not in self._peers:
                return False
            self._shut_out(found)
        return True

    def shut_out(self, found: Contradiction) -> None:
        """Shut out a key against which this peer has proof: of an earlier process, or by its own journal."""
        with self._lock:
            if found.public_key not in self._faults:
                self._shut_out(found)

    def confirm(self, key: bytes, now: float, certificate: str = "") -> bool:
        """Let the peer count that has shown to have this key; return whether it does.

        It does not if its card is unknown or its lease has passed, if `limit` peers count already, or if a
        peer at another address that counts has the same certificate. Of several keys at one address only the
        one that was confirmed last counts.

        Args:
            key: Public key of the peer.
            now: Time.
            certificate: Fingerprint of the certificate that it has shown to have; "" without TLS.
        """
        with self._lock:
            now_s = self._at(now)
            self._lapse(now_s)
            entry = self._peers.get(key)
            if entry is None or _is_over(entry, now_s):
                return False
            others = [one for one in self._peers.values() if one.confirmed and one is not entry]
            if not entry.confirmed and len(others) >= self._limit:
                return False
            if certificate and any(_is_twin(one, entry.card, certificate) for one in others):
                return False
            for one in others:
                if one.card.address and one.card.address == entry.card.address:
                    one.confirmed = False
            entry.confirmed, entry.certificate = True, certificate
            return True

    def twin(self, card: PeerCard, certificate: str, now: float) -> PeerCard | None:
        """Return the card of another peer that counts with this certificate elsewhere; None without one."""
        with self._lock:
            self._lapse(self._at(now))
            others = [one for key, one in self._peers.items() if one.confirmed and key != card.public_key]
            return next((one.card for one in others if _is_twin(one, card, certificate)), None)

    def live(self, now: float) -> dict[bytes, PeerCard]:
        """Return the cards of the peers that count, with this peer's own card, by key."""
        with self._lock:
            self._lapse(self._at(now))
            found = {key: entry.card for key, entry in self._peers.items() if entry.confirmed}
            return found | ({self._own_key: self._own.card} if self._own else {})

    def cards(self, now: float) -> dict[bytes, bytes]:
        """Return the encoded cards of the peers that count, with this peer's own one, by key."""
        with self._lock:
            self._lapse(self._at(now))
            found = {key: entry.data for key, entry in self._peers.items() if entry.confirmed}
            return found | ({self._own_key: self._own.data} if self._own else {})

    def newer(self, known: Mapping[bytes, int], caller: bytes, now: float) -> list[bytes]:
        """Return the cards of peers that count to tell a caller, and its own one, so that it exceeds it.

        known: serials that the caller knows, by the first bytes of the key.
        """
        with self._lock:
            self._lapse(self._at(now))
            return [
                entry.data
                for key, entry in self._peers.items()
                if (entry.confirmed or key == caller) and known.get(key[:KEY_PREFIX], 0) < entry.card.serial
            ]

    def serials(self) -> dict[bytes, int]:
        """Return the newest serial of each known key, confirmed or not, by the first bytes of the key."""
        with self._lock:
            found = {key[:KEY_PREFIX]: entry.card.serial for key, entry in self._peers.items()}
            return found | {self._own_key[:KEY_PREFIX]: self._own_serial}

    def _at(self, now: float) -> float:
        self._now_s = max(self._now_s, now)
        return self._now_s

    def _as_known(self, data: bytes) -> PeerCard | None:
        """Return the known card of the same key if `data` is not newer, without a look at its signature."""
        claimed = parsed_card(data)
        with self._lock:
            entry = self._peers.get(claimed.public_key)
            is_old = entry and (data == entry.data or claimed.serial < entry.card.serial)
            return entry.card if entry and is_old else None

    def _taken(self, card: PeerCard, data: bytes, now_s: float) -> Offer:
        """Return the result for a card that is valid by itself, and remember it if it is newer."""
        key = card.public_key
        if key == self._own_key:
            return self._taken_own(card, data)
        if key in self._faults:
            return Offer("refused", reason=f"its key is shut out: {self._faults[key].reason}")
        if self._allow and key not in self._allow:
            return Offer("refused", reason=f"key {key.hex()} of {card.name!r} is not in swarm.allow")
        entry = self._peers.get(key)
        if entry and card.serial == entry.card.serial and data != entry.data:
            found = contradiction(entry.data, data)
            assert found is not None, "two valid cards of one key and serial that differ are a proof"
            return Offer("refused", reason=self._shut_out(found))
        if entry and card.serial <= entry.card.serial:
            return Offer("known", entry.card)
        # At another address, or with another certificate, it has to answer again.
        is_same = entry is not None and _place(entry.card) == _place(card) and not _is_over(entry, now_s)
        confirmed = entry is not None and entry.confirmed and is_same
        certificate = entry.certificate if entry is not None and confirmed else ""
        self._peers[key] = _Entry(data, card, now_s, confirmed, certificate)
        self._peers.move_to_end(key)
        surplus = len(self._peers) - 2 * self._limit
        if surplus > 0:  # the oldest of those that are not confirmed
            waiting = (other for other, one in self._peers.items() if not one.confirmed)
            for other in list(islice(waiting, surplus)):
                del self._peers[other]
        return Offer("newer" if confirmed else "new", card)

    def _taken_own(self, card: PeerCard, data: bytes) -> Offer:
        own = self._own
        self._own_serial = max(self._own_serial, card.serial)
        if own and card.serial == own.card.serial and data != own.data:
            self._own_fault = (
                f"another process uses this peer's key {self._own_key.hex()}, at"
                f" {card.address or 'no address'}: give each peer a key file of its own"
            )
        return Offer("own", card)

    def _shut_out(self, found: Contradiction) -> str:
        """Shut a key out; return why."""
        entry = self._peers.pop(found.public_key, None)
        if entry is not None and found.statement is not None:
            found = replace(found, reason=f"{printable(entry.card.name)!r}: {found.reason}")
        self._faults[found.public_key] = found
        while len(self._faults) > self._limit:
            self._faults.popitem(last=False)
        return found.reason

    def _lapse(self, now_s: float) -> None:
        for entry in self._peers.values():
            if entry.confirmed and _is_over(entry, now_s):
                entry.confirmed = False


def _is_over(entry: _Entry, now_s: float) -> bool:
    return now_s - entry.seen_s >= entry.card.lease_s


def _is_twin(one: _Entry, card: PeerCard, certificate: str) -> bool:
    return one.certificate == certificate and one.card.address != card.address


def _place(card: PeerCard) -> tuple[str, str]:
    return card.address, card.fingerprint
