"""Reports of a training loop to its agent after every step, and the data that it draws."""

import time
from dataclasses import replace

from aedit.edit.hub_lease import LeasedPositions, Positions
from aedit.edit.hub_settings import HubSettings
from aedit.edit.shards import Shards
from aedit.edit.waiting import Waiter
from aedit.proto.agent import Link, Progress


class StepReport:
    """Steps, speed, loss and samples of one node, for its hub."""

    def __init__(self, link: Link, settings: HubSettings, *, tokens_per_step: int, leases_data: bool) -> None:
        """Report to the agent behind `link`."""
        self.link, self.settings = link, settings
        self.tokens_per_step, self.leases_data = tokens_per_step, leases_data
        self.loss = float("nan")
        self._waiter = Waiter(Shards(), settings.edit.timeout_s)
        self._leased = LeasedPositions(link, self._waiter)
        self._progress = Progress()
        self._member = False
        self._began_s = time.monotonic()

    @property
    def drawn(self) -> int:
        """Samples drawn in this attempt."""
        return self._leased.drawn

    def begin(self, shards: Shards) -> None:
        """Start the clock: the node is a member from now on."""
        self._waiter.shards, self._member = shards, True
        self._began_s = time.monotonic()

    def draw(self, n: int) -> Positions:
        """Return the next `n` positions, or none once the run is finished; see `HubExchange.lease`."""
        if not self.leases_data:
            raise ValueError("no data is leased to this node: call HubExchange.join(..., num_samples=...)")
        if not self._member:
            raise ValueError("the hub leases data to members only: call lease() inside `with sync:`")
        return self._leased.take(n, or_end=True)

    def step(self, steps: int, waited_s: float, used: int) -> None:
        """Report an inner step: steps so far, seconds spent waiting, samples used."""
        waited_s += self._waiter.waited_s
        busy_s = max(0.0, time.monotonic() - self._began_s - waited_s)
        self._progress = Progress(steps, steps * self.tokens_per_step, busy_s, waited_s)
        self.tell(used)

    def tell(self, used: int) -> None:
        """Report once more, with the samples used by now."""
        if self._waiter.shards.leads:
            self.link.tell(replace(self._progress, loss=self.loss, used=used, drawn=self.drawn))
