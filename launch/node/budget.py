"""Budget of a run: the used share of it, and the node that evaluates."""

from typing import Protocol

from aedit.edit import LayerSync
from aedit.launch.config import RunConfig
from aedit.launch.node.world import World
from aedit.launch.records import Clock
from aedit.proto.agent import Link


class NodeBudget(Protocol):
    """Budget of a run; all ranks of a node call its methods together, at the same steps."""

    def goes_on(self) -> bool:
        """Return whether the run needs another step."""

    def progress(self) -> float:
        """Return the used share of the budget, 0 to 1, which the learning rate schedule follows."""

    def nodes(self) -> int:
        """Return the number of live nodes for the learning rate; 1 may stand for any if it follows none."""

    def evaluates(self) -> bool:
        """Return whether this node computes the held-out loss."""


class WorldBudget:
    """Budget of the nodes of one `torchrun` world, computed from their rounds."""

    def __init__(self, config: RunConfig, world: World, sync: LayerSync, clock: Clock) -> None:
        self.config, self.world, self.sync, self.clock = config, world, sync, clock

    def goes_on(self) -> bool:
        """Return whether the run needs another step.

        With a time schedule all nodes see the end of the budget at the same round.
        """
        if self._counts_own_steps:
            return self.sync.steps < self.config.train.steps
        timed_out = self._elapsed_share() >= 1.0
        return self.sync.shards.decide([not timed_out and self._steps_share() < 1.0])[0] == 1

    def progress(self) -> float:
        """Return the used share of the budget, 0 to 1, extrapolated from the last round."""
        if self._counts_own_steps:
            return min(1.0, self.sync.steps / self.config.train.steps)
        since = self.sync.local_steps - self.sync.schedule.last_step
        ahead = (
            since / self.config.train.steps
        )  # assuming as many steps of the other nodes since the last round
        return min(1.0, max(self._steps_share() + ahead, self._elapsed_share()))

    def nodes(self) -> int:
        """Return the number of nodes of the world."""
        return self.world.nodes

    def evaluates(self) -> bool:
        """Return whether this is node 0, which evaluates."""
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
    """Budget of a run with a hub, which counts accepted steps and reports progress and end."""

    _BILLION = 10**9

    def __init__(self, config: RunConfig, sync: LayerSync, link: Link) -> None:
        self.config, self.sync, self.link = config, sync, link

    def goes_on(self) -> bool:
        """Return whether the hub has not yet reported the end of the run."""
        return self.sync.shards.decide([not self.link.news().finished])[0] == 1

    def progress(self) -> float:
        """Return the share that the hub reported, extrapolated since then; equal on all ranks of the node."""
        news = self.link.news()
        steps = self.sync.local_steps - self.sync.schedule.last_step
        since = steps / self.config.train.steps
        if self.config.train.seconds and news.age_s < float("inf"):
            since = max(since, news.age_s / self.config.train.seconds)
        share = min(1.0, news.progress + since)
        return self.sync.shards.decide([int(share * self._BILLION)])[0] / self._BILLION

    def nodes(self) -> int:
        """Return the live nodes that the hub reported, equal on all ranks of the node."""
        if not self.config.train.lr_by_nodes:  # spares the ranks an agreement in each step
            return 1
        return self.sync.shards.decide([max(1, self.link.news().nodes)])[0]

    def evaluates(self) -> bool:
        """Return whether the hub has chosen this node to evaluate."""
        return self.sync.shards.decide([self.link.news().evaluates])[0] == 1
