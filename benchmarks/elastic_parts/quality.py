"""Part of `benchmarks.elastic` with real gradients.

Held-out loss while nodes come and go, in virtual time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from aedit.clock import VirtualClock
from aedit.launch.node import make_inners, set_lr
from benchmarks.kit.small_llama import inner_step
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import (
    Method,
    Node,
    Setting,
    adopt_anchors,
    make_hub,
    make_node,
    start_model,
    warm_up,
)

SPEEDS_S = (1.0, 0.8, 1.3, 1.0, 0.7, 1.6)
"""Seconds per step of the nodes, in the order in which they come."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Members of one phase. killed: those of the nodes leaving at its start that leave without a message."""

    nodes: frozenset[int]
    killed: frozenset[int] = frozenset()


PHASES = (
    Membership(frozenset({0})),
    Membership(frozenset({0, 1, 2, 3})),
    Membership(frozenset({0, 3}), killed=frozenset({2})),
    Membership(frozenset({0, 1, 2, 3, 4, 5})),
    Membership(frozenset({1, 3, 5}), killed=frozenset({2, 4})),
)
"""1 -> 4 -> 2 -> 6 -> 3, and the founder goes, too."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out loss of the anchors, at equal distances of virtual time."""

    at_s: tuple[float, ...]
    loss: tuple[float, ...]

    def jump(self, changed_s: float, window_s: float) -> float:
        """Return how far the loss rises above that before the change, as a share; below 0 it only fell."""
        before = [loss for at_s, loss in zip(self.at_s, self.loss, strict=True) if at_s <= changed_s][-1]
        after = [
            loss
            for at_s, loss in zip(self.at_s, self.loss, strict=True)
            if changed_s < at_s <= changed_s + window_s
        ]
        return max(after) / before - 1

    @property
    def largest_rise(self) -> float:
        """Return the largest rise between two neighbours, as a share: the loss's own fluctuation."""
        return max(b / a - 1 for a, b in zip(self.loss, self.loss[1:], strict=False))


def setting(seed: int, phase_s: float) -> Setting:
    """Return the setting, whose local steps are those of the schedule as a mean over six nodes."""
    steps = sum(phase_s / SPEEDS_S[node] for phase in PHASES for node in phase.nodes)
    return Setting(seed=seed, step_s=SPEEDS_S, steps=round(steps / len(SPEEDS_S)), held_out=64)


class Elastic:
    """One run under `PHASES`."""

    def __init__(self, of: Setting, method: Method, phase_s: float, look_s: float) -> None:
        """Set up the run; look_s: virtual seconds between two measurements of the loss."""
        self.setting, self.method, self.phase_s, self.look_s = of, method, phase_s, look_s
        self.start = warm_up(of)
        self.probe: nn.Module = start_model(of, self.start)[0]
        self.clock = VirtualClock()
        self.hub = make_hub(of, method, self.probe, self.clock)
        self.nodes: dict[int, Node] = {}
        self.done = self.joined = 0

    def run(self) -> Curve:
        """Train through all phases. Every phase but the first begins with the change of membership."""
        curve: list[tuple[float, float]] = []
        for number, phase in enumerate(PHASES):
            self._change(phase)
            end_s = (number + 1) * self.phase_s
            while (look_at_s := len(curve) * self.look_s) < end_s:
                self._walk(look_at_s)
                curve.append((look_at_s, self._loss()))
            self._walk(end_s)
        curve.append((self.clock.now_s, self._loss()))
        return Curve(tuple(at_s for at_s, _ in curve), tuple(loss for _, loss in curve))

    def _change(self, phase: Membership) -> None:
        for index in sorted(self.nodes.keys() - phase.nodes):
            node = self.nodes.pop(index)
            if index not in phase.killed:  # the hub finds out about those by their silence
                node.sync.__exit__(None, None, None)
        for index in sorted(phase.nodes - self.nodes.keys()):
            self.nodes[index] = self._join(index)

    def _join(self, index: int) -> Node:
        model, inners = start_model(self.setting, self.start)
        if self.joined:  # a node that joins later has no optimizer state yet
            inners = make_inners(model, self.setting.train)
        shard = self.setting.shard(index, seed=2 + self.joined)
        node = make_node(self.hub, self.setting, self.method, index, (model, inners), shard)
        node.sync.__enter__()
        self.joined += 1
        return node

    def _walk(self, end_s: float) -> None:
        """Take all steps that end by `end_s`."""
        while (node := min(self.nodes.values(), key=lambda node: node.next_s)).next_s <= end_s:
            self._at(node.next_s)
            set_lr(node.sync.inner, self.setting.lr_after(self.done))
            inner_step(node.sync.model, node.sync.inner, node.shard.take(self.setting.batch_size))
            node.sync.step()
            node.next_s += node.step_s
            self.done += 1
        self._at(end_s)

    def _at(self, now_s: float) -> None:
        self.clock.advance_to(now_s)
        for node in self.nodes.values():
            node.link.heartbeat(1 / node.step_s)
        self.hub.tick()

    def _loss(self) -> float:
        adopt_anchors(self.probe, self.hub.hub.anchor, next(iter(self.nodes.values())).sync)
        return held_out_loss(self.probe, self.setting.seq_len, self.setting.held_out)


def jumps(curves: Sequence[Curve], phase_s: float, window_s: float) -> list[float]:
    """Return the largest jump over all runs, for each change."""
    changes_s = [number * phase_s for number in range(1, len(PHASES))]
    return [max(curve.jump(at_s, window_s) for curve in curves) for at_s in changes_s]
