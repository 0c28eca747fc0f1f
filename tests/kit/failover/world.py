"""Virtual time, a network that loses, delays, repeats and reorders, and the accounts of what was promised.

Deterministic: a history is its seed and its list of faults.
"""

import heapq
import math
import random
from dataclasses import dataclass, field


class Violation(AssertionError):
    """A promise of the protocol was broken."""


@dataclass(frozen=True)
class Fault:
    """At `at_s` something happens to `who`; see `schedule.apply`."""

    at_s: float
    kind: str
    who: int = 0
    other: int = 0
    lasts_s: float = 0.0

    def __str__(self):
        return f"{self.at_s:5.2f} s  {self.kind} {self.who} {self.other} for {self.lasts_s:.2f} s"


@dataclass
class Network:
    """Faults of the links between hubs and nodes."""

    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.01
    cut: set = field(default_factory=set)
    """Ordered pairs (from, to) that let nothing through."""


@dataclass
class Accounts:
    """Acknowledgements that nodes have received."""

    acknowledged: dict = field(default_factory=dict)
    """Term in which it was first acknowledged, by (node, seq) of a push."""
    leaders: dict = field(default_factory=dict)
    """Hub that has acknowledged something, by term."""
    versions: dict = field(default_factory=dict)
    """Pushes in an anchor, by its version."""

    def acknowledges(self, hub, term, push):
        first = self.leaders.setdefault(term, hub)
        if first != hub:
            raise Violation(f"hubs {first} and {hub} have both acknowledged under term {term}")
        self.acknowledged.setdefault(push, term)

    def tells(self, version, parts):
        if self.versions.setdefault(version, parts) != parts:
            raise Violation(f"version {version} is {self.versions[version]} and {parts}")

    def check_log(self, hub, pushes, term=math.inf):
        """Check the journal of a hub whose first configuration in a term is agreed, or that leads at the end.

        A leader that was paused may learn of the agreement when another one leads already.
        """
        if len(set(pushes)) != len(pushes):
            raise Violation(f"hub {hub} has a push twice: {sorted(pushes)}")
        lost = {push for push, at in self.acknowledged.items() if at <= term} - set(pushes)
        if lost:
            raise Violation(f"hub {hub} leads and lacks acknowledged pushes: {sorted(lost)}")


class World:
    """Events in order of virtual time."""

    def __init__(self, seed):
        self.now, self.random = 0.0, random.Random(seed)
        self.network, self.accounts = Network(), Accounts()
        self.processes = {}
        self._events, self._count = [], 0

    def at(self, time_s, call, *args):
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, call, args))

    def after(self, delay_s, call, *args):
        self.at(self.now + delay_s, call, *args)

    def send(self, sender, to, kind, *args):
        """Send a message; it may arrive late, twice, in another order or never."""
        net, chance = self.network, self.random.random
        if net.loss and chance() < net.loss:
            return
        self.after(net.delay_s * (0.2 + 2 * chance()), self._deliver, sender, to, kind, args)
        if net.repeat and chance() < net.repeat:
            self.after(net.delay_s * 100 * chance(), self._deliver, sender, to, kind, args)

    def _deliver(self, sender, to, kind, args):
        if (sender, to) not in self.network.cut:
            self.processes[to].receive(sender, kind, args)

    def run(self, until_s, done=lambda: False):
        """Run until that time, or until `done`; return whether it was done."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(events)
            call(*args)
            if done():
                return True
        self.now = until_s
        return done()
