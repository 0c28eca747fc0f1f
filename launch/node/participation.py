"""Participation of a node in its run: with the nodes of its `torch.distributed` world, or with a hub."""

from typing import TYPE_CHECKING, Protocol

from aedit.launch.node.stop import Stopped
from aedit.types import Round

if TYPE_CHECKING:
    from aedit.launch.node.train import TrainingNode


class Participation(Protocol):
    """Operations of a node that depend on how it exchanges with other nodes."""

    def begin(self, node: "TrainingNode") -> None:
        """Prepare for the first step."""

    def record_step(self, node: "TrainingNode") -> None:
        """Report a finished step."""

    def leave_early(self, node: "TrainingNode") -> tuple[list[Round], str]:
        """Leave before the end of the run.

        Returns the rounds that other nodes will not open, to be opened again after a resume, and the reason
        for the record of the stop.
        """


class WorldParticipation:
    """Participation of nodes that take part in each round together and leave together."""

    def begin(self, node: "TrainingNode") -> None:
        """Do nothing: the world was joined when the process group was made."""

    def record_step(self, node: "TrainingNode") -> None:
        """Do nothing: nodes exchange only in rounds."""

    def leave_early(self, node: "TrainingNode") -> tuple[list[Round], str]:
        """Land what all nodes have opened and abandon other rounds; return those and the reason.

        No node is waited for in between, since others may wait for this node's part of a round that all have
        opened.
        """
        try:
            node.sync.finish()
        except Stopped:
            return node.sync.abandon(), "signal"
        return [], "signal"
