"""Virtual time, processes, and a network that loses, delays, repeats and reorders.

Deterministic: a history is its seed and its list of faults.
"""

import heapq
import random
from dataclasses import dataclass, field

from aedit.proto.rpc import HubUnreachable, PortClosed

DONE_EVERY = 8
"""Events that are made between two looks whether a run is done."""


class Violation(AssertionError):
    """A promise of the protocol was broken."""


@dataclass(frozen=True)
class Fault:
    """At `at_s` something happens to `who`; see `histories.Simulation`."""

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
    gap_s: float = 0.0
    """Between two chunks of a stream, on a slow line."""
    cut: set = field(default_factory=set)
    """Ordered pairs (from, to) that let nothing through."""


class Process:
    """A process that may be dead, or paused; its clock has a rate and an origin of its own."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.alive, self.is_off, self.paused_until, self.life = False, False, 0.0, 0
        self._held = []
        """What has come while it was paused."""
        self.rate, self.began_s = world.random.uniform(0.9, 1.1), world.random.uniform(0, 1e4)

    def clock(self):
        return self.began_s + self.rate * self.world.now

    def after(self, delay_s, call, *args):
        """Call after a time by the clock of this process, if it is alive and no other one by then."""
        self.world.after(delay_s / self.rate, self.awake, self.life, call, *args)

    def awake(self, life, call, *args):
        if not self.alive or life != self.life:
            return
        if self._held or self.world.now < self.paused_until:
            self._held.append((life, call, args))
        else:
            call(*args)

    def pause(self, until_s):
        """Do nothing until then; afterwards everything that has come, in order."""
        self.paused_until = until_s
        self.world.at(until_s, self._go_on)

    def _go_on(self):
        if self.world.now >= self.paused_until:
            held, self._held = self._held, []
            for life, call, args in held:
                self.awake(life, call, *args)

    def seen_by(self, caller):
        """Return the process that another one reaches at the address of this one."""
        return self

    def call(self, to, method, *args, then, timeout_s=1.0):
        """Call another process; `then` gets its answer, HubRefused or HubUnreachable, exactly once."""
        to = to.seen_by(self)
        call = Call(self, to, method, args, then)
        self.world.carry(self, to, call.serve, may_repeat=True)
        self.after(timeout_s, call.expire)


class Call:
    """A call on its way, without references in a cycle: most objects of a history belong to calls."""

    __slots__ = ("_args", "_life", "_method", "_sender", "_then", "_to")

    def __init__(self, sender, to, method, args, then):
        self._sender, self._to, self._method, self._args, self._then = sender, to, method, args, then
        self._life = sender.life

    def serve(self):
        to = self._to
        if to.alive:
            to.awake(to.life, self._ask)
        elif not to.is_off:
            self._reply(PortClosed(f"{self._method}: nothing listens at {to.number}"))

    def _ask(self):
        self._reply(self._to.serve(self._method, *self._args))

    def _ask_again(self, ask):
        self._reply(ask())

    def _reply(self, answer):
        to, sender = self._to, self._sender
        if callable(answer):  # the other one waits for something
            to.after(0.1, self._ask_again, answer)
        else:
            to.world.carry(to, sender, sender.awake, self._life, self._finish, answer)

    def _finish(self, answer):
        if self._then is not None:
            then, self._then = self._then, None
            then(answer)

    def expire(self):
        if self._then is not None:
            self._finish(HubUnreachable(f"{self._method}: no answer of {self._to.number}"))


class World:
    """Events in order of virtual time."""

    def __init__(self, seed):
        self.now, self.random = 0.0, random.Random(seed)
        self.network = Network()
        self._events, self._count = [], 0
        self.check = lambda: None
        """Called after every event."""

    def at(self, time_s, call, *args):
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, call, args))

    def after(self, delay_s, call, *args):
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, call, args))

    def carry(self, sender, to, call, *args, may_repeat=False):
        """Carry a message; it may arrive late, in another order or never, and some of them twice."""
        net, chance = self.network, self.random.random
        if net.loss and chance() < net.loss:
            return
        pair = (sender.number, to.number)
        self.after(net.delay_s * (0.2 + 2 * chance()), self._arrive, pair, call, args)
        if may_repeat and net.repeat and chance() < net.repeat:
            self.after(net.delay_s * 100 * chance(), self._arrive, pair, call, args)

    def _arrive(self, pair, call, args):
        if pair not in self.network.cut:
            call(*args)

    def run(self, until_s, done=lambda: False):
        """Run until that time, or until `done`; return whether it was done."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(events)
            call(*args)
            self.check()
            if self._count % DONE_EVERY == 0 and done():
                return True
        self.now = until_s
        return done()
