"""How a node takes part in its run: with the nodes of its `torch.distributed` world, or with a hub."""

from typing import TYPE_CHECKING, Protocol

from aedit.launch.node.stop import Stopped
from aedit.types import Round

if TYPE_CHECKING:
    from aedit.launch.node.train import Node


class Participation(Protocol):
    """The part of a node's life that depends on how it meets other nodes."""

    def begin(self, node: "Node") -> None:
        """Prepare for the first step."""

    def note_step(self, node: "Node") -> None:
        """Report a finished step."""

    def leave_early(self, node: "Node") -> tuple[list[Round], str]:
        """Leave before the end of the run.

        Returns the rounds that other nodes will not open, to be opened again after a resume, and the reason
        for the record of the stop.
        """


class WorldParticipation:
    """All nodes take part in every round and leave together."""

    def begin(self, node: "Node") -> None:
        """Do nothing: the world was joined when the process group was made."""

    def note_step(self, node: "Node") -> None:
        """Do nothing: nobody asks between rounds."""

    def leave_early(self, node: "Node") -> tuple[list[Round], str]:
        """Finish what every node has opened and abandon the rest.

        Others may be waiting for this node's part of a round that all have opened, so nothing else is waited
        for in between.
        """
        try:
            node.sync.finish()
        except Stopped:
            return node.sync.abandon(), "signal"
        return [], "signal"
