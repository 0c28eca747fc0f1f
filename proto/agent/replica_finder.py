"""Finds the hubs of a part for a node: those of the configuration, or the replicas in a peer's file."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

from aedit.proto.agent.plan import AgentPlan
from aedit.proto.swarm import ReplicasFile
from aedit.types import UserError

_LOOK_S = 0.2


def replicas_of_parts(path: Path, limit_s: float) -> Sequence[str]:
    """Return the address of the owner of each part, or of a replica, as soon as one is known for each.

    A part may have no owner because it needs the vote of this node. Raises UserError if no replica of a part
    is known within `limit_s`.
    """
    file, deadline_s = ReplicasFile(path), time.monotonic() + limit_s
    while True:
        found = [part.owner or next(iter(part.replicas), "") for part in file.parts()]
        if found and all(found):
            return found
        if time.monotonic() > deadline_s:
            missing = ", ".join(str(k) for k, owner in enumerate(found) if not owner) or "any part"
            raise UserError(
                f"{path}: no replica of {missing} was found within {limit_s:g} s; see the peer's log"
            )
        time.sleep(_LOOK_S)


class ReplicaFinder:
    """The hubs of one part that may lead, besides the one that a node follows."""

    def __init__(self, plan: AgentPlan, part: int) -> None:
        self._part, self._standbys = part, deque(plan.standbys_of(part))
        self._file = ReplicasFile(Path(plan.replicas)) if plan.replicas else None

    def others(self, current: str) -> Sequence[str]:
        """Return the hubs besides `current` to be asked now, in this order.

        Those are the replicas in a swarm, the one that leads first, and else one standby, the next at each
        call.
        """
        if self._file is not None:
            places = self._file.part(self._part)
            ordered = dict.fromkeys((places.owner, places.first, *places.replicas))
            return [one for one in ordered if one and one != current]
        self._standbys.rotate(-1)
        return list(self._standbys)[-1:]

    def adopt(self, new: str, old: str) -> None:
        """Note that a node follows `new` from now on, and not `old`, which may come back as a standby."""
        if self._file is None:
            self._standbys.remove(new)
            self._standbys.append(old)

    def has_moved(self, current: str) -> bool:
        """Return whether the peers know another owner than `current`."""
        owner = self._file.part(self._part).owner if self._file is not None else ""
        return bool(owner) and owner != current

    def keys_of(self, address: str) -> Collection[str]:
        """Return the keys, in hexadecimal, that may sign for a hub of a swarm; see `ReplicasFile.keys_of`."""
        return self._file.keys_of(address) if self._file is not None else ()

    def is_shut_out(self, address: str) -> bool:
        """Return whether there is proof against the peer of a hub; see `ReplicasFile.is_shut_out`."""
        return self._file is not None and self._file.is_shut_out(address)
