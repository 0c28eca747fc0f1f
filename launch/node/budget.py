"""How much of a run is used up, who says so, and which node measures the held-out loss."""

from typing import Protocol

from aedit.edit.sync import LayerSync
from aedit.launch.config.config import RunConfig
from aedit.launch.node.world import World
from aedit.launch.rundir.recorder import Clock
from aedit.proto.agent.link import Link


class Budget(Protocol):
    """Asked by all ranks of a node together, at the same steps."""

    def goes_on(self) -> bool:
        """Whether another step is wanted."""

    def progress(self) -> float:
        """Share of the run that is used up, 0 to 1, as the learning rate follows it."""

    def evaluates(self) -> bool:
        """Whether this node measures the held-out loss, so that the others need not."""


class OwnBudget:
    """Nodes of one `torchrun` world, which know all they need from their rounds."""

    def __init__(self, config: RunConfig, world: World, sync: LayerSync, clock: Clock) -> None:
        self.config, self.world, self.sync, self.clock = config, world, sync, clock

    def goes_on(self) -> bool:
        """With a time schedule all nodes see the budget used up at one round."""
        if self._counts_own_steps:
            return self.sync.steps < self.config.train.steps
        timed_out = self._elapsed_share() >= 1.0
        return self.sync.shards.decide([not timed_out and self._steps_share() < 1.0])[0] == 1

    def progress(self) -> float:
        if self._counts_own_steps:
            return min(1.0, self.sync.steps / self.config.train.steps)
        since = self.sync.local_steps - self.sync.schedule.last_step
        ahead = since / self.config.train.steps  # as if the others had gone as far since the last round
        return min(1.0, max(self._steps_share() + ahead, self._elapsed_share()))

    def evaluates(self) -> bool:
        return self.world.node == 0

    @property
    def _counts_own_steps(self) -> bool:
        return self.config.edit.schedule == "steps" or self.config.edit.warmup_steps == "all"

    def _elapsed_share(self) -> float:
        seconds = self.config.train.seconds
        return self.clock.elapsed_s / seconds if seconds else 0.0

    def _steps_share(self) -> float:
        warmup_steps = self.sync.steps - self.sync.local_steps
        done = self.sync.total_steps + self.world.nodes * warmup_steps
        return done / (self.world.nodes * self.config.train.steps)


class HubBudget:
    """Nodes that come and go: the hub counts what it has accepted, and says when it is enough."""

    _BILLION = 10**9

    def __init__(self, config: RunConfig, sync: LayerSync, link: Link) -> None:
        self.config, self.sync, self.link = config, sync, link

    def goes_on(self) -> bool:
        return self.sync.shards.decide([not self.link.news().finished])[0] == 1

    def progress(self) -> float:
        """The hub's number and what has happened since it was said, equal on all ranks of the node."""
        news = self.link.news()
        steps = self.sync.local_steps - self.sync.schedule.last_step
        since = steps / self.config.train.steps
        if self.config.train.seconds and news.age_s < float("inf"):
            since = max(since, news.age_s / self.config.train.seconds)
        share = min(1.0, news.progress + since)
        return self.sync.shards.decide([int(share * self._BILLION)])[0] / self._BILLION

    def evaluates(self) -> bool:
        return self.sync.shards.decide([self.link.news().evaluates])[0] == 1
