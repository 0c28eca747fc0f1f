"""Node of a run with a hub: the same training loop, but it joins and leaves on its own."""

from dataclasses import dataclass, field

from aedit.edit.hub_exchange import HubExchange
from aedit.launch.data.leased import LeasedOrder
from aedit.launch.node.checkpoint import Mark
from aedit.launch.node.stop import LEAVE_HUB_WITHIN_S, Stopped
from aedit.launch.node.train import TrainingNode
from aedit.proto.agent.link import Link, Progress
from aedit.proto.transports.transport import PeersMissing


@dataclass(slots=True, kw_only=True)
class HubNode(TrainingNode):
    """Training node with a `link` to its agent; `exchange` is that of `sync`."""

    link: Link
    exchange: HubExchange
    leaves_by_s: float = field(default=LEAVE_HUB_WITHIN_S)

    def begin(self) -> None:
        """Start as any node, and report to the hub before leaving."""
        # No super(): a dataclass with slots is a new class, not the one that super() refers to.
        TrainingNode.begin(self)
        self.exchange.before_leaving = self._tell

    def record_step(self) -> None:
        """Record the step, and report it to the hub."""
        TrainingNode.record_step(self)
        self._tell()

    def leave_early(self) -> None:
        """Push the pending updates, leave the run and save.

        If the hub is unreachable for 20 s, leave without them: the checkpoint counts these steps, the run
        does not.
        """
        self.order = self.meter.undo_draw(self.order)
        self.stop.announce(self.sync.position)
        self.exchange.timeout_s = min(self.exchange.timeout_s, self.leaves_by_s)
        reason = "signal"
        try:
            self._tell()
            self.sync.close()
        except (Stopped, PeersMissing, TimeoutError) as error:
            self.sync.abandon()
            reason = f"signal; the hub did not take the last steps: {error}"
        self.record_metrics()
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
