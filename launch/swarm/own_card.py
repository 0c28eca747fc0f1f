"""The card of this peer, signed anew when something in it has changed or its lease runs out."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aedit.launch.config import RunConfig
from aedit.proto.rpc import SigningKey
from aedit.proto.swarm import Founding, KnownPeers, NodeState, PartReplica, PeerCard, Serials, encoded

_RENEWALS = 4
"""Times that a card is renewed within a lease."""


class OwnCard:
    """Makes the cards of this peer."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        directory: Path,
        key: SigningKey,
        known: KnownPeers,
        fingerprint: str = "",
    ) -> None:
        """Make none yet. fingerprint: of the TLS certificate of this peer; "" without one."""
        self._fingerprint = fingerprint
        self._run, self._name, self._lease_s = config.name, name, config.swarm.lease_s
        self._key, self._known, self._serials = key, known, Serials(directory / "serial")
        self._last: PeerCard | None = None
        self._data = b""
        self._made_s = 0.0
        self.leaving = False
        """True once this peer ends: others then do without it at once."""

    def current(
        self,
        address: str,
        parts: Mapping[int, PartReplica],
        foundings: Mapping[int, Founding],
        node: NodeState,
    ) -> bytes:
        """Return the encoded card with these values; another speed alone waits for the next renewal.

        Raises:
            OSError: The serial cannot be kept.
        """
        card = PeerCard(
            run=self._run,
            name=self._name,
            public_key=self._key.public,
            serial=1,
            address=address,
            parts=parts,
            fingerprint=self._fingerprint,
            model=node.model,
            lease_s=self._lease_s,
            leaving=self.leaving,
            foundings=foundings,
        )
        now_s = time.monotonic()
        if card != self._last or now_s > self._made_s + self._lease_s / _RENEWALS:
            serial = self._serials.next(above=self._known.own_serial)
            full = replace(card, serial=serial, steps_per_s=node.steps_per_s)
            self._data = encoded(full, self._key.private)
            self._last, self._made_s = card, now_s
        return self._data
