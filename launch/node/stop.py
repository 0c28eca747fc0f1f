"""Ctrl-C and SIGTERM: finish the step, land, save, leave - all nodes of one world together.

A node that stops posts its position (see `LayerSync.position`) and promises not to move beyond it. A node
that waits for a meeting which a stopped node will not come to stops too. When all have stopped, a round
that everybody has opened is landed, and one that somebody has not is abandoned by those who have, to be
opened again after the resume.
"""

import signal
import time
from types import FrameType

from aedit.edit.schedule import Notes
from aedit.edit.shards import Shards
from aedit.proto.transports.memory import MemoryWorld

LEAVE_WITHIN_S = 60.0
LEAVE_HUB_WITHIN_S = 20.0
"""How long a node that leaves waits for a hub that does not answer: it may have been ended as well."""


class Stopped(Exception):
    """Leaves the training loop at a step boundary, or out of a wait that cannot end."""


class Stop:
    """One node's side of leaving together."""

    def __init__(self, node: int, nodes: int, notes: Notes, shards: Shards) -> None:
        self.node, self.nodes, self.notes, self.shards = node, nodes, notes, shards
        self._signalled = False
        self._leave_within_s = LEAVE_WITHIN_S
        self._leave_by = float("inf")

    def listen(self) -> None:
        """Catch the first SIGINT or SIGTERM; a second one ends the process at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)

    def check(self) -> None:
        """Raise `Stopped` if this node or another one was asked to stop. Once per step, on all ranks
        alike."""
        if self._signalled:
            self.notes.post("stop", str(self.node))
        asked = self.shards.leads and (self._signalled or self.notes.read("stop") is not None)
        if self.shards.decide([int(asked)])[0]:
            raise Stopped

    def while_waiting(self, needed: int) -> None:
        """Raise `Stopped` if a node has stopped before the position that must be reached for the wait to
        end, or if this node is leaving and has waited long enough."""
        late = time.monotonic() > self._leave_by
        if late or any(position < needed for position in self._known("stopped").values()):
            raise Stopped

    def promise(self, position: int) -> None:
        """Tell the others that this node goes no further than `position`. From now on it waits for them for a
        limited time: a dead node must not keep the living from saving."""
        self.notes.post(f"stopped/{self.node}", str(position))
        self._leave_by = time.monotonic() + self._leave_within_s

    def greatest(self, name: str, mine: int) -> int:
        """Return the greatest of a number that every stopping node has, of those heard of within a minute."""
        return self.shards.decide([max(self._everybodys(name, mine))])[0]

    def _everybodys(self, name: str, mine: int) -> list[int]:
        self.notes.post(f"{name}/{self.node}", str(mine))
        deadline = time.monotonic() + LEAVE_WITHIN_S
        while len(known := self._known(name)) < self.nodes and time.monotonic() < deadline:
            time.sleep(0.02)
        return list(known.values())

    def _known(self, name: str) -> dict[int, int]:
        noted = {node: self.notes.read(f"{name}/{node}") for node in range(self.nodes)}
        return {node: int(number) for node, number in noted.items() if number is not None}


class StopAlone(Stop):
    """A node that leaves a hub leaves nobody waiting: a signal also ends a wait for the hub."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(0, 1, MemoryWorld(1).node(0), shards)
        self._leave_within_s = LEAVE_HUB_WITHIN_S

    def while_waiting(self, needed: int) -> None:
        """All ranks of the node together. A node that is leaving already waits some seconds for its hub."""
        leaving = self._leave_by < float("inf")
        enough = time.monotonic() > self._leave_by if leaving else self._signalled
        if self.shards.decide([int(enough)])[0]:
            raise Stopped
