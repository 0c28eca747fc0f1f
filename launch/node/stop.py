"""Graceful stop on Ctrl-C and SIGTERM.

Finish the step, land, save and leave, all nodes of one world together.

A node that stops publishes its position (see `LayerSync.position`) and does not move beyond it. A node that
waits for an exchange in which a stopped node will not take part stops too. When all have stopped, a round
that all nodes have opened lands; a round that some have not opened is abandoned by the others and opened
again after the resume.
"""

import signal
import time
from types import FrameType

from aedit.edit import Notes, Shards
from aedit.proto.transports import MemoryWorld

LEAVE_WITHIN_S = 60.0
LEAVE_HUB_WITHIN_S = 20.0
"""Longest wait of a leaving node for an unreachable hub, which may have been stopped too."""


class Stopped(Exception):
    """Raised to leave the training loop at a step boundary, or a wait that cannot end."""


class Stop:
    """Graceful stop of one node, coordinated with the others."""

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
        """Raise `Stopped` if this or another node was asked to stop. Once per step, on all ranks alike."""
        if self._signalled:
            self.notes.post("stop", str(self.node))
        asked = self.shards.leads and (self._signalled or self.notes.read("stop") is not None)
        if self.shards.decide([int(asked)])[0]:
            raise Stopped

    def while_waiting(self, needed: int) -> None:
        """Raise `Stopped` if a wait cannot end or has exceeded its deadline during a stop.

        It cannot end if a node has stopped before the position `needed`.
        """
        late = time.monotonic() > self._leave_by
        if late or any(position < needed for position in self._known("stopped").values()):
            raise Stopped

    def announce(self, position: int) -> None:
        """Announce that this node goes no further than `position`.

        From now on its waits for them have a deadline: a dead node must not keep the others from saving.
        """
        self.notes.post(f"stopped/{self.node}", str(position))
        self._leave_by = time.monotonic() + self._leave_within_s

    def greatest(self, name: str, mine: int) -> int:
        """Return the greatest value of `mine` over the stopping nodes that answer within a minute."""
        self.notes.post(f"{name}/{self.node}", str(mine))
        deadline = time.monotonic() + LEAVE_WITHIN_S
        while len(known := self._known(name)) < self.nodes and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.shards.decide([max(known.values())])[0]

    def _known(self, name: str) -> dict[int, int]:
        noted = {node: self.notes.read(f"{name}/{node}") for node in range(self.nodes)}
        return {node: int(number) for node, number in noted.items() if number is not None}


class StopAlone(Stop):
    """Graceful stop of a node of a hub, for which no other node waits.

    A signal also ends a wait for the hub.
    """

    def __init__(self, shards: Shards) -> None:
        super().__init__(0, 1, MemoryWorld(1).node(0), shards)
        self._leave_within_s = LEAVE_HUB_WITHIN_S

    def while_waiting(self, needed: int) -> None:
        """Raise `Stopped` after a signal; a node that is leaving first waits some seconds for its hub.

        All ranks of the node together.
        """
        leaving = self._leave_by < float("inf")
        enough = time.monotonic() > self._leave_by if leaving else self._signalled
        if self.shards.decide([int(enough)])[0]:
            raise Stopped
