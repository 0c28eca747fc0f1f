"""Loss of runs with and without a partition: real gradients, nodes and parts of a swarm, in virtual time.

Each part is a hub's state machine at the side of most of its replicas, by the keys of the peers. Nodes of the
other side do not reach it: it gives them up, they train on, and push what they have when they reach it again.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from aedit.async_sgd.hub import NodeReport, run_news
from aedit.async_sgd.inprocess import InProcessHub, make_push
from aedit.async_sgd.rules import Vector
from aedit.clock import VirtualClock
from aedit.launch.config import load
from aedit.proto.agent import Answer, Progress
from aedit.proto.swarm import hosts_of
from aedit.types import News, Verdict
from benchmarks.kit.processes import ROOT, in_parallel
from benchmarks.kit.tables import Bar, Report
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import (
    Method,
    Setting,
    adopt_anchors,
    finish,
    make_hub,
    node_of,
    start_model,
    train_step,
    warm_up,
)

SPEEDS_S = (1.0, 0.8, 1.3, 1.0, 0.7, 1.6)
"""Seconds per step of the six nodes."""
PARTS, COPIES, EXPIRE_S = 3, 3, 10.0
CUT_AT, LASTS = 0.3, 0.2
"""Shares of the run: when the partition begins, and how long it lasts."""
SEEDS, STEPS, QUICK_STEPS = (0, 1, 2), 240, 24
RISE = 0.02


class Wires:
    """Connections between nodes and parts."""

    def __init__(self, sides: Sequence[int], seed: int) -> None:
        """Place the parts by keys that are drawn from a seed. sides: of each node."""
        keys = [hashlib.sha256(f"{seed} {node}".encode()).digest() for node in range(len(sides))]
        self._sides, self.is_cut = sides, False
        self._home = []
        for part in range(PARTS):
            count = Counter(sides[keys.index(key)] for key in hosts_of("loss", part, keys, COPIES))
            self._home.append(count.most_common(1)[0][0])

    def reaches(self, node: int, part: int) -> bool:
        """Return whether the owner of a part and a node can call each other."""
        return not self.is_cut or self._sides[node] == self._home[part]


@dataclass(slots=True)
class _Sent:
    """A push under way."""

    seq: int
    values: Vector
    facts: dict[str, int]
    number: int = 0
    """That it has at the hub; 0 until it has been delivered."""


class PartsLink:
    """A node's link to all parts: what cannot be delivered waits, as at its agent."""

    def __init__(self, parts: Sequence[InProcessHub], index: int, wires: Wires) -> None:
        """Join all parts."""
        self._parts, self._index, self._wires = parts, index, wires
        self._name = f"node {index}"
        for part in parts:
            self.node = part.join(self._name)
        numels = [unit.numel for unit in parts[0].layout.units]
        self.anchors: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.outbox: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.bytes_sent = 0
        self._sent: dict[int, _Sent] = {}
        self._news = News(age_s=0.0, nodes=len(parts))
        self.longest = 0
        """Most steps of a push that was merged."""

    @property
    def is_member(self) -> bool:
        """Return True: a node that was given up joins again."""
        return True

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Fetch every unit; the first node brings the first anchors."""
        for unit, anchor in enumerate(self.anchors):
            if self._part(unit).hub.state.units[unit].version == 0:
                self._offer(unit, anchor, {"base": 0, "steps": 0, "tokens": 0})
        return tuple(self._fetch(unit) for unit in range(len(self.anchors)))

    def written(self, unit: int, seq: int) -> None:
        """See `Link.written`. There is one rank, which calls `send` next."""

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int) -> None:
        """Push outbox[unit], at once or when the part can be reached."""
        facts = {"base": base, "steps": steps, "tokens": tokens}
        self._sent[unit] = _Sent(seq, self.outbox[unit].copy(), facts)
        self._deliver(unit)

    def answer(self, unit: int, seq: int) -> Answer | None:
        """Return the part's decision on push `seq` once there is one."""
        sent = self._sent[unit]
        self._deliver(unit)
        part = self._part(unit)
        part.tick()
        told = part.hub.state.members[self._node(unit)].decisions.get(unit)
        is_decided = sent.number and told is not None and told.seq == sent.number
        if not self._reaches(unit) or not is_decided or told is None or told.verdict == Verdict.NONE:
            return None
        if told.verdict == Verdict.MERGED:
            self.longest = max(self.longest, sent.facts["steps"])
        return Answer(seq, self._fetch(unit), told.verdict)

    def news(self) -> News:
        """Return what the owner of part 0 has said last."""
        part = self._parts[0]
        if self._wires.reaches(self._index, 0) and self._is_in(part):
            told = run_news(part.hub, part.hub.state.names[self._name], part.clock())
            self._news = News(round=told.round, pace_steps=told.pace_steps, nodes=told.nodes)
        return self._news

    def tell(self, progress: Progress) -> None:
        """Report nothing: heartbeats tell the speed."""

    def heartbeat(self, steps_per_s: float) -> None:
        """Say to all parts that can be reached that the node is there; join those again that gave it up."""
        for number, part in enumerate(self._parts):
            if self._wires.reaches(self._index, number):
                node = part.join(self._name) if not self._is_in(part) else part.hub.state.names[self._name]
                part.heartbeat(node, NodeReport(steps_per_s=steps_per_s, state="training"))

    def leases(self, upto: int = 0) -> Sequence[tuple[int, int]]:
        """Return nothing: the node has its own data."""
        return ()

    def residuals(self) -> Mapping[int, Vector]:
        """Return nothing: values are sent as they are."""
        return {}

    def leave(self, timeout_s: float) -> None:
        """Leave all parts."""
        for part in self._parts:
            part.leave(part.hub.state.names[self._name])

    def _part(self, unit: int) -> InProcessHub:
        return self._parts[unit % len(self._parts)]

    def _node(self, unit: int) -> int:
        return self._part(unit).hub.state.names[self._name]

    def _is_in(self, part: InProcessHub) -> bool:
        return part.hub.state.members[part.hub.state.names[self._name]].live

    def _reaches(self, unit: int) -> bool:
        return self._wires.reaches(self._index, unit % len(self._parts))

    def _deliver(self, unit: int) -> None:
        sent = self._sent[unit]
        if not sent.number and self._reaches(unit) and self._is_in(self._part(unit)):
            sent.number = self._offer(unit, sent.values, sent.facts)

    def _offer(self, unit: int, values: Vector, facts: dict[str, int]) -> int:
        part, node = self._part(unit), self._node(unit)
        number = part.hub.state.members[node].received.get(unit, 0) + 1
        layout = part.layout.units[unit]
        part.offer(make_push(values, layout, node=node, unit=unit, seq=number, **facts))
        self.bytes_sent += values.nbytes
        return number

    def _fetch(self, unit: int) -> int:
        version, values = self._part(unit).hub.anchor(unit)
        self.anchors[unit][:] = values
        return version


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    loss: float
    """Held-out loss of the last anchors, nats per byte."""
    longest: int
    """Most steps of a push that was merged."""


def setting_of(seed: int, steps: int) -> Setting:
    """Return the setting: six nodes and a model of three units."""
    return Setting(seed=seed, step_s=SPEEDS_S, steps=steps, num_layers=2, warmup_steps=64)


def train(setting: Setting, sides: Sequence[int]) -> Outcome:
    """Train a swarm that is cut into these sides for a while, or never if all are on one."""
    config, clock, start = load(ROOT / "configs" / "swarm.toml", []).config, VirtualClock(), warm_up(setting)
    method = Method(
        hub=replace(config.hub, expire_s=EXPIRE_S, codec="fp32"),
        outer=config.outer,
        penalty=config.edit.penalty,
        pace="seconds",
    )
    models = [start_model(setting, start) for _ in sides]
    parts = [make_hub(setting, method, models[0][0], clock, (k, PARTS)) for k in range(PARTS)]
    wires = Wires(sides, setting.seed)
    links = [PartsLink(parts, index, wires) for index in range(len(sides))]
    nodes = [
        node_of(link, setting, method, index, pair, clock)
        for index, (link, pair) in enumerate(zip(links, models, strict=True))
    ]

    def tick() -> None:
        for part in parts:
            part.tick()

    for node in nodes:
        node.sync.__enter__()
    total = setting.steps * len(nodes)
    for done in range(total):
        wires.is_cut = CUT_AT <= done / total < CUT_AT + LASTS
        node = min(nodes, key=lambda node: node.next_s)
        clock.advance_to(node.next_s)
        for other in nodes:
            other.link.heartbeat(1 / other.step_s)
        tick()
        samples = node.shard.take(setting.batch_size)
        train_step(node.sync.model, node.sync.optimizers.outermost, setting.lr_after(done), samples)
        node.sync.step()
        node.next_s += node.step_s
    finish(tick, clock, nodes)
    adopt_anchors(probe := models[0][0], lambda unit: parts[unit % PARTS].hub.anchor(unit), nodes[0].sync)
    loss = held_out_loss(probe, setting.seq_len, setting.held_out)
    return Outcome(loss, max(link.longest for link in links))


def report(sizes: str, *, quick: bool) -> Report:
    """Return the table of runs with a partition into sides of these sizes, and without."""
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if quick else (SEEDS, STEPS)
    sides = [side for side, size in enumerate(sizes.split(",")) for _ in range(int(size))]
    jobs = [(setting_of(seed, steps), cut) for seed in seeds for cut in ([0] * len(sides), sides)]
    outcomes = in_parallel(train, jobs)
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    rises = [cut.loss / calm.loss - 1 for calm, cut in pairs]
    rows = tuple(
        (str(seed), *(f"{one.loss:.4f}" for one in (calm, cut)), f"{rise:+.2%}", str(cut.longest))
        for seed, (calm, cut), rise in zip(seeds, pairs, rises, strict=True)
    )
    mean = sum(rises) / len(rises)
    return Report(
        "loss with a partition",
        (f"Real gradients in virtual time: six unequal nodes, {steps} steps each on average, {PARTS} parts.",
         f"Cut into sides of {sizes} from {CUT_AT:.0%} to {CUT_AT + LASTS:.0%} of it; `configs/swarm.toml`."),
        ("seed", "calm", "partition", "rise", "steps of the longest push"),
        rows,
        (Bar(f"held-out loss rises by {mean:+.2%}, wanted <= {RISE:.0%}", None if quick else mean <= RISE),),
        {"rises": rises, "outcomes": [asdict(one) for one in outcomes]},
    )  # fmt: skip
