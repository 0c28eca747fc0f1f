"""A node of a run with a hub: the same training loop, but it comes and goes alone."""

from dataclasses import dataclass, field

from aedit.edit.hub_exchange import HubExchange
from aedit.launch.data.leased import LeasedOrder
from aedit.launch.node.checkpoint import Mark
from aedit.launch.node.stop import LEAVE_HUB_WITHIN_S, Stopped
from aedit.launch.node.train import Node
from aedit.proto.agent.link import Link, Progress
from aedit.proto.transports.transport import PeersMissing


@dataclass(slots=True, kw_only=True)
class HubNode(Node):
    """link: to this node's agent. exchange: that of `sync`, which asks the hub."""

    link: Link
    exchange: HubExchange
    leaves_by_s: float = field(default=LEAVE_HUB_WITHIN_S)

    def begin(self) -> None:
        Node.begin(self)  # slots: the class is made anew, and super() would look for the first one
        self.exchange.before_leaving = self._tell

    def note_step(self) -> None:
        Node.note_step(self)
        self._tell()

    def leave_early(self) -> None:
        """Push what is owed, say goodbye, save. Without a hub for 20 s, leave with the rest unsaid: it is
        in the checkpoint's count, not in the run."""
        self.order = self.meter.undo_draw(self.order)
        self.stop.promise(self.sync.position)
        self.exchange.timeout_s = min(self.exchange.timeout_s, self.leaves_by_s)
        reason = "signal"
        try:
            self._tell()
            self.sync.close()
        except (Stopped, PeersMissing, TimeoutError) as error:
            self.sync.abandon()
            reason = f"signal; the hub did not take the last steps: {error}"
        self.note_metrics()
        self.save(Mark(self.milestone, self._next_sub()))
        self.recorder.event("stop", reason=reason, step=self.sync.steps, tokens=self.tokens)

    def _tell(self) -> None:
        if not self.sync.shards.leads:
            return
        clock, train = self.recorder.clock, self.config.train
        assert isinstance(self.order, LeasedOrder)
        self.link.tell(
            Progress(
                steps=self.sync.steps,
                tokens=self.tokens,
                busy_s=clock.busy_s,
                wait_s=self.sync.waited_s,
                loss=self.newest_loss,
                used=self.exchange.used_steps * train.batch_size * train.accumulate,
                drawn=self.order.drawn,
            )
        )
