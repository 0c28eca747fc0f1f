"""Checks what owners of parts sign about the anchors that they give, and passes it on to the peer."""

import logging
import threading
from collections import deque
from pathlib import Path

from aedit.proto.agent.membership import Membership
from aedit.proto.agent.plan import AgentPlan
from aedit.proto.rpc import Statement, is_signed, parsed
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import STATEMENTS, write_statements

log = logging.getLogger(__name__)

_VERSIONS = 4
"""Newest statements of each unit that the peer is told."""


class Unsigned(ValueError):
    """An owner has given an anchor without a statement that is valid for it; the text says what is wrong."""


class StatementCheck:
    """Checks for one node. Any thread may call. Outside a swarm it checks nothing."""

    def __init__(self, plan: AgentPlan) -> None:
        self._run = plan.run
        self._path = Path(plan.replicas).parent / STATEMENTS if plan.replicas else None
        self._lock = threading.Lock()
        self._kept = [deque[bytes](maxlen=_VERSIONS) for _ in plan.units]
        self._is_new = False

    @property
    def is_on(self) -> bool:
        """Return whether owners must sign: in a swarm."""
        return self._path is not None

    def check(self, membership: Membership, unit: int, head: pb.PullHead, digest: bytes) -> None:
        """Keep the statement in the answer of the owner to a pull.

        Args:
            membership: At that owner.
            unit: Unit that was pulled.
            head: First message of the answer.
            digest: SHA-256 of the anchor as it is here now.

        Raises:
            Unsigned: There is none, or it is not for this anchor, or not signed by a host of that owner.
        """
        if not self.is_on:
            return
        place = f"unit {unit}, version {head.version} from {membership.address}"
        try:
            found = parsed(head.statement)
        except ValueError as error:
            raise Unsigned(f"{place}: the owner has not signed it: {error}") from None
        self._compare(place, found, (self._run, membership.part, unit, head.version))
        if found.sha256 != digest:
            raise Unsigned(f"{place}: the owner has signed another value than it has given")
        if found.public_key.hex() not in membership.host_keys():
            key = found.public_key.hex()[:16]
            raise Unsigned(
                f"{place}: signed with the key {key}..., which no live peer has there that is not shut out"
            )
        if not is_signed(head.statement):
            raise Unsigned(f"{place}: the signature is not of the key that it names")
        with self._lock:
            if head.statement not in self._kept[unit]:
                self._kept[unit].append(head.statement)
                self._is_new = True

    def save(self) -> None:
        """Write what is new into the file that the peer of this machine reads."""
        with self._lock:
            if self._path is None or not self._is_new:
                return
            kept, self._is_new = [data for of_unit in self._kept for data in of_unit], False
        try:
            write_statements(self._path, kept)
        except OSError as error:
            log.warning("%s: %s; other nodes do not hear of these statements", self._path, error)

    def _compare(self, place: str, found: Statement, wanted: tuple[str, int, int, int]) -> None:
        told = (found.run, found.part, found.unit, found.version)
        if told != wanted:
            raise Unsigned(f"{place}: the owner has signed (run, part, unit, version) {told}, not {wanted}")
