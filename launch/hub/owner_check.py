"""Check at a follower that the owner of a part has signed what its journal gives."""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from aedit.async_sgd.replication import Mirror
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.rpc import Statement, is_signed_statement, parsed_statement
from aedit.proto.swarm import STATEMENTS, StatementsFile

log = logging.getLogger(__name__)
_KEPT = 16
"""Newest versions of each unit of which the hash is kept."""
_MOST_SHOWN = 4


class OwnerCheck:
    """Finds statements of the owner that differ from the versions which its own journal gives here.

    The journal has what went into each version, and applying it is deterministic to the bit. So an owner that
    gives all nodes the same wrong anchors is found by each follower alone. A follower is believed by its own
    peer only: others recompute the versions themselves.
    """

    def __init__(
        self, mirror: Mirror, endpoint: HubEndpoint, event: Callable[..., None], owner: Callable[[], str]
    ) -> None:
        """Compare with what `mirror` applies from now on. owner: returns the address of the owner."""
        self._mirror, self._endpoint, self._event, self._owner = mirror, endpoint, event, owner
        self._run, self._part = endpoint.config.name, endpoint.part[0]
        self._file = StatementsFile(endpoint.directory / STATEMENTS)
        self._lock = threading.Lock()
        self._of: tuple[str, int] = ("", 0)
        """Journal and term of the owner whose versions are kept."""
        self._digests: dict[int, OrderedDict[int, bytes]] = {}
        """SHA-256 of anchors by unit and version."""
        self._waiting: dict[bytes, Statement] = {}
        """Statements that are not compared yet."""
        self._compared: set[bytes] = set()
        """The others in the file."""
        self._false: dict[bytes, bytes] = {}
        """False statements, with the SHA-256 that the journal gives."""

    @property
    def found(self) -> list[list[str]]:
        """Return false statements of owners and the SHA-256 that the journal gives, in hexadecimal."""
        with self._lock:
            return [[one.hex(), true.hex()] for one, true in list(self._false.items())[:_MOST_SHOWN]]

    def note(self) -> None:
        """Keep the hashes of the versions that have just been applied."""
        with self._mirror.lock:
            hub, epoch = self._mirror.hub, self._mirror.epoch
            if (epoch, hub.state.term) != self._of:  # versions that were taken back are not compared
                self._of = epoch, hub.state.term
                self._digests.clear()
            new = {
                number: hub.anchor(number)
                for number, unit in hub.state.units.items()
                if unit.anchor is not None and unit.version not in self._digests.get(number, ())
            }
        for number, (version, values) in new.items():
            of_unit = self._digests.setdefault(number, OrderedDict())
            of_unit[version] = hashlib.sha256(values.data.cast("B")).digest()
            while len(of_unit) > _KEPT:
                of_unit.popitem(last=False)

    def compare(self) -> None:
        """Compare what nodes have received since the last call, and what was ahead of this journal then.

        Only statements with a key of the owner's peer count: others say nothing about this part.
        """
        if changed := self._file.changed():
            self._compared &= set(changed)
            self._waiting = {}
            for data in set(changed) - self._compared:
                with suppress(ValueError):
                    self._waiting[data] = parsed_statement(data)
        replicas, address = self._endpoint.replicas, self._owner()
        if not self._waiting or replicas is None or not address:
            return
        keys = replicas.keys_of(address)
        for data, said in list(self._waiting.items()):
            known = self._digests.get(said.unit, OrderedDict())
            is_of_now = (said.run, said.part, said.lineage, said.term) == (self._run, self._part, *self._of)
            if is_of_now and said.version > max(known, default=0):
                continue  # it was acknowledged by all replicas: the record is on its way
            del self._waiting[data]
            self._compared.add(data)
            true = known.get(said.version, said.sha256)
            is_owners = is_of_now and said.public_key.hex() in keys
            if is_owners and true != said.sha256 and is_signed_statement(data):
                self._blame(data, said, true)

    def _blame(self, data: bytes, said: Statement, true: bytes) -> None:
        key = said.public_key.hex()
        reason = f"{said.described()}: what the key {key[:16]}... has signed is not what its journal gives"
        log.error("%s", reason)
        self._event("false_anchor", key=key, unit=said.unit, version=said.version, reason=reason)
        with self._lock:
            self._false[data] = true
