"""Participation of a node in a run with a hub: it joins and leaves independently of other nodes."""

from dataclasses import dataclass

from aedit.edit import HubExchange
from aedit.launch.node.stop import LEAVE_HUB_WITHIN_S, Stopped
from aedit.launch.node.train import TrainingNode
from aedit.proto.agent import Link, Progress
from aedit.proto.transports import PeersMissing
from aedit.types import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParticipation:
    """Participation that reports each step to the node's agent and leaves without waiting for other nodes.

    `link` connects to the agent, and `exchange` is that of the node's `sync`.
    """

    link: Link
    exchange: HubExchange
    leave_within_s: float = LEAVE_HUB_WITHIN_S
    """Longest wait of a leaving node for a hub that does not answer."""

    def begin(self, node: TrainingNode) -> None:
        """Report once more before the node leaves, so that the hub can lease its unused samples to others."""
        self.exchange.before_leaving = lambda: self.record_step(node)

    def record_step(self, node: TrainingNode) -> None:
        """Report steps, tokens, times, loss, used samples and reinforcement learning to the agent."""
        if not node.sync.shards.leads:
            return
        self.link.tell(
            Progress(
                steps=node.sync.steps,
                tokens=node.tokens,
                busy_s=node.recorder.clock.busy_s,
                wait_s=node.sync.waited_s,
                loss=node.newest_loss,
                used=node.objective.used(self.exchange.used_steps),
                drawn=node.objective.drawn(),
                rl=node.rl.report() if node.rl else {},
            )
        )

    def leave_early(self, node: TrainingNode) -> tuple[list[Round], str]:
        """Push the pending updates and leave; return no rounds, and the reason.

        If the hub does not answer within `leave_within_s`, the checkpoint counts the last steps, and the run
        does not.
        """
        self.exchange.timeout_s = min(self.exchange.timeout_s, self.leave_within_s)
        try:
            self.record_step(node)
            node.sync.close()
        except (Stopped, PeersMissing, TimeoutError) as error:
            node.sync.abandon()
            return [], f"signal; the hub did not take the last steps: {error}"
        return [], "signal"
