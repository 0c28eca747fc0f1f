"""A node of a run with a hub: it comes and goes alone."""

from dataclasses import dataclass

from aedit.edit.hub_exchange import HubExchange
from aedit.launch.data.leased import LeasedOrder
from aedit.launch.node.stop import LEAVE_HUB_WITHIN_S, Stopped
from aedit.launch.node.train import Node
from aedit.proto.agent.link import Link, Progress
from aedit.proto.transports.transport import PeersMissing
from aedit.types import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParticipation:
    """Reports every step to the node's agent, and leaves without waiting for other nodes.

    link: to the agent. exchange: that of the node's `sync`. order: the node's leased samples.
    """

    link: Link
    exchange: HubExchange
    order: LeasedOrder
    leave_within_s: float = LEAVE_HUB_WITHIN_S
    """How long a node that leaves waits for a hub that does not answer."""

    def begin(self, node: Node) -> None:
        """Report once more before the node leaves, so that its unused samples go to others."""
        self.exchange.before_leaving = lambda: self.note_step(node)

    def note_step(self, node: Node) -> None:
        """Tell the agent steps, tokens, times, loss and used samples."""
        if not node.sync.shards.leads:
            return
        train = node.config.train
        self.link.tell(
            Progress(
                steps=node.sync.steps,
                tokens=node.tokens,
                busy_s=node.recorder.clock.busy_s,
                wait_s=node.sync.waited_s,
                loss=node.newest_loss,
                used=self.exchange.used_steps * train.batch_size * train.accumulate,
                drawn=self.order.drawn,
            )
        )

    def leave_early(self, node: Node) -> tuple[list[Round], str]:
        """Push what has not been pushed and leave.

        If the hub does not answer within `leave_within_s`, the last steps are in the checkpoint's count and
        not in the run.
        """
        self.exchange.timeout_s = min(self.exchange.timeout_s, self.leave_within_s)
        try:
            self.note_step(node)
            node.sync.close()
        except (Stopped, PeersMissing, TimeoutError) as error:
            node.sync.abandon()
            return [], f"signal; the hub did not take the last steps: {error}"
        return [], "signal"
