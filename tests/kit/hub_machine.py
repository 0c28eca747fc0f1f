"""A hub's state machine on its own clock, with a journal in memory."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from aedit.async_sgd.hub import Hub, Joiner, NodeReport
from aedit.async_sgd.rules import (
    HubConfig,
    HubPlan,
    Joined,
    OuterConfig,
    PenaltyConfig,
    Push,
    PushFilterConfig,
    StalenessConfig,
)
from aedit.types import Layout, TensorLayout, UnitLayout

LAYOUT = Layout(
    (
        UnitLayout("first", (TensorLayout("w", (3, 2)), TensorLayout("b", (2,)))),
        UnitLayout("second", (TensorLayout("w", (5,)),)),
    )
)
FACTS = (("data.seq_len", "128"), ("seed", "0"))
AVERAGE = OuterConfig(kind="average", lr=1.0)
TRUSTING = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=10**9)


class Numbers:
    """Payload of a push, in memory."""

    def __init__(self, values):
        self.values = np.array(values, np.float32)

    def read(self, start, stop):
        return self.values[start:stop].copy()


class Int8:
    """Coarse codec with one scale for all values, `steps` levels and optional feedback."""

    def __init__(self, levels=127, feedback=False):
        self.levels, self.feedback = levels, feedback

    def encode(self, x):
        scale = np.float32(np.abs(x).max() / self.levels or 1.0)
        return scale.tobytes() + np.rint(x / scale).astype(np.int8).tobytes()

    def decode(self, data, numel, start, stop):
        scale = np.frombuffer(data[:4], np.float32)[0]
        return np.frombuffer(data[4:], np.int8)[start:stop].astype(np.float32) * scale


def config(**settings):
    plain = {"address": "h:1", "weights": "uniform", "push_filter": TRUSTING}
    plain |= {"staleness": StalenessConfig(rule="constant")}
    plain |= {"grace": 0.0} if settings.get("quorum", 1) == 1 else {}
    return HubConfig(**(plain | settings))


def plan(hub=None, outer=AVERAGE, every=10, steps=1000, **more):
    penalty = PenaltyConfig(clip=10.0 if hub and hub.weights == "penalty" else None)
    return HubPlan(hub=hub or config(), outer=outer, penalty=penalty, every=every, steps=steps, **more)


class World:
    """One hub, its clock, and every record it has decided on."""

    def __init__(self, plan=None, quantiser=None, layout=LAYOUT):
        self.plan, self.quantiser, self.layout = plan, quantiser, layout
        self.hub = Hub(plan, quantiser)
        self.now, self.journal = 100.0, []

    def do(self, decided):
        for record in decided:
            self.journal.append(record)
            self.hub.apply(record)
        return decided

    def join(self, name="a", **changes):
        """Join a node of this name; return its index."""
        decided = self.do(self.hub.join(joiner(name, **({"layout": self.layout} | changes)), self.now))
        return next(record for record in decided if isinstance(record, Joined)).node

    def make(self, node, values, unit=0, **changes):
        """Return the node's next push of the unit, of 10 steps on the newest version."""
        x = np.asarray(values, np.float32)
        tensors = self.layout.units[unit].tensors
        ends = np.cumsum([0, *(tensor.numel for tensor in tensors)])
        x = np.full(ends[-1], x) if x.ndim == 0 else x
        norms = tuple(float(np.linalg.norm(x[a:b].astype(np.float64))) for a, b in pairwise(ends))
        push = Push(
            node=node,
            unit=unit,
            seq=self.hub.state.members[node].received.get(unit, 0) + 1,
            base=self.hub.state.units[unit].version,
            steps=10,
            tokens=100,
            values=Numbers(x),
            norms=norms,
        )
        return replace(push, **changes)

    def push(self, node, values, unit=0, **changes):
        return self.do(self.hub.offer(self.make(node, values, unit, **changes), self.now))

    def tick(self, seconds=0.0):
        self.now += seconds
        return self.do(self.hub.tick(self.now))

    def settle(self):
        """Tick without advancing the clock until nothing more is due."""
        for _ in range(1000):
            if not self.tick():
                return
        raise AssertionError("the hub always finds something to do")

    def found(self, node=0, value=0.0):
        """Send the first anchors."""
        for unit in self.hub.state.units:
            self.push(node, value, unit, base=0, steps=0, tokens=0)
        self.settle()

    def heartbeat(self, node, state="training", **numbers):
        self.hub.heartbeat(node, NodeReport(state=state, **numbers), self.now)

    def lease(self, node, samples):
        decided = self.do(self.hub.lease(node, samples, self.now))
        return [(record.start, record.end) for record in decided]

    def replayed(self, saved=None, since=0):
        """Return another hub that has applied the same records."""
        hub = Hub(self.plan, self.quantiser)
        if saved:
            hub.restore(saved)
        for record in self.journal[since:]:
            hub.apply(record)
        return hub


def through_a_file(saved):
    """Return what a snapshot keeps: numbers as JSON, arrays copied."""
    units = [
        replace(
            unit,
            numbers=json.loads(json.dumps(unit.numbers, allow_nan=False)),
            arrays={name: array.copy() for name, array in unit.arrays.items()},
        )
        for unit in saved[1]
    ]
    return json.loads(json.dumps(saved[0], allow_nan=False)), units


def picture(hub):
    """Return the state that must be equal, to the bit, after a restart; comparable with ==."""
    numbers, saved_units = hub.saved()
    units = [
        (
            unit.index,
            json.dumps(unit.numbers),
            {name: array.tobytes() for name, array in unit.arrays.items()},
            [(push.node, push.seq) for push in unit.pending],
        )
        for unit in saved_units
    ]
    return json.dumps(numbers), units


def world(nodes=1, more=None, **settings):
    """Return a founded hub with `nodes` members, by default with a quorum of one and plain averaging."""
    made = World(plan(config(**settings), **(more or {})))
    for i in range(nodes):
        made.join(f"node{i}")
    made.found()
    return made


class Training:
    """Nodes of a hub that push as they train, each at a speed of its own.

    step_s: seconds per step of each node. steps: in each push. The pushes are vectors of noise with the norm
    that so many steps have.
    """

    def __init__(self, made, step_s, steps=16, seed=0):
        self.made, self.step_s, self.steps = made, step_s, steps
        self.rng = np.random.default_rng(seed)
        self.due = [(made.now + steps * step, node) for node, step in enumerate(step_s)]
        self.decided = []

    def vector(self, steps, unit=0, times=1.0):
        """Return noise as long as `times` the usual progress of so many steps."""
        x = self.rng.normal(size=self.made.layout.units[unit].numel)
        return 0.1 * times * steps**0.75 * x / np.linalg.norm(x)

    def push(self, node, steps, times=1.0, unit=0, **changes):
        """Push at the present time, and merge what is due; return what the hub has decided on the push."""
        self.made.tick()
        changes = {"steps": steps, "tokens": 10 * steps} | changes
        decided = self.made.push(node, self.vector(steps, unit, times), unit, **changes)
        self.decided += decided
        self.made.settle()
        return decided

    def beat(self):
        for node, step in enumerate(self.step_s):
            if node in self.made.hub.state.live:
                self.made.heartbeat(node, steps_per_s=1 / step)

    def run(self, seconds, but=()):
        """Train for so long; nodes in `but` only report."""
        end = self.made.now + seconds
        while min(self.due)[0] <= end:
            at, node = min(self.due)
            self.due.remove((at, node))
            self.due.append((at + self.steps * self.step_s[node], node))
            self.made.now = max(self.made.now, at)
            self.beat()
            if node not in but:
                self.push(node, self.steps)
        self.made.now = end
        self.beat()


def kinds(decided):
    return [type(record) for record in decided]


def values(made, unit=0):
    return made.hub.anchor(unit)[1]


def joiner(name, **changes):
    """Return a node that shows that it is the one of this name."""
    own = Joiner(name=name, layout=LAYOUT, facts=FACTS, num_samples=1000, proof=f"secret of {name}")
    return replace(own, **changes)


def poison(made, node, unit=0, **changes):
    return made.push(node, 1.0, unit, norms=(math.nan,) * len(LAYOUT.units[unit].tensors), **changes)
