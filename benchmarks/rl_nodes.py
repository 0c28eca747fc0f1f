"""Measure the solved share of 1, 2, 4 and 8 nodes that train one policy at equal samples in all.

    python -m benchmarks.rl_nodes [--quick] [--seeds 3] [--processes 2] [--json FILE]

Nodes of unequal, fixed pace push to a hub of a quorum of one. Rollouts, losses, steps, exchanges and the hub
are real; time is virtual, so that the load of the machine changes nothing. The rules for an arrival and for
the inner rate: those of the preset `tiny-rl`, and others. One node that takes all samples of a step of N
nodes in one step shows what averaging over nodes costs.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aedit.async_sgd.inprocess import InProcessHub, InProcessLink
from aedit.async_sgd.rules import HubPlan, OuterConfig
from aedit.clock import VirtualClock
from aedit.edit import EditConfig, HubExchange, LayerSync, PenaltyConfig, make_pace
from aedit.launch.config import RunConfig, TrainConfig, load
from aedit.launch.node import lr_at, make_inner, set_lr
from aedit.spec_rollout import LossSettings, find_loss
from benchmarks.kit.paced import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.statistics import mean_and_half_width
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.virtual_hub import adopt_anchors
from benchmarks.off_policy import Batch, Sorter, batches, solved, warmed_up

ABOUT = "Solved share of 1 to 8 nodes at equal samples, by the rule for an arrival at the hub."
CONFIGS = Path(__file__).parents[1] / "configs"
NODES = (1, 2, 4, 8)
STEP_S = (1.0, 1.0, 1.5, 2.0, 1.0, 1.0, 1.5, 2.0)
"""Seconds per step of the nodes."""
GROUPS = 4
"""Per step: few, so that one node's gradient is noisy, as on real tasks."""
STEPS = 2400
"""Inner steps of all nodes together."""
LR = 4e-3
"""Inner rate of one node. At 1.4 times this rate one node alone collapses."""
ANSWER_WITHIN_S = 30.0
"""Longest wait for the hub in this process, which answers at once."""
CLOSE = 3.0
"""Points by which more nodes may end below one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Effect of an arrival, and of the number of nodes on the rates."""

    outer: OuterConfig
    by_nodes: float = 0.0
    """Power of the number of nodes by which the outer learning rate grows."""
    factor: float = 1.0
    """Of the outer learning rate."""
    inner_by_nodes: float = 0.0
    """Power of the number of nodes by which the inner learning rate grows."""
    gathered: bool = False
    """Whether one node takes the samples of a step of all nodes in one step."""

    def of(self, nodes: int) -> OuterConfig:
        """Return the outer settings for so many nodes."""
        return replace(self.outer, lr=self.outer.lr * self.factor * nodes**self.by_nodes)

    def train(self, shipped: TrainConfig) -> TrainConfig:
        """Return the inner settings of a preset with the rates of this rule."""
        return replace(shipped, lr=LR, lr_by_nodes=self.inner_by_nodes)


def preset(name: str) -> RunConfig:
    """Return the configuration of a preset."""
    return load([CONFIGS / f"{name}.toml"], []).config


PRESET = "preset `tiny-rl`: its share"
AVERAGE = OuterConfig(kind="average", lr=1.0)


def rules() -> dict[str, Rule]:
    """Return the rules by name. A whole push is N times the share of 1 / N that the hub takes of it."""
    shipped = preset("tiny-rl")
    return {
        PRESET: Rule(shipped.outer, inner_by_nodes=shipped.train.lr_by_nodes),
        "its share, one inner rate": Rule(AVERAGE),
        "whole (a sum)": Rule(AVERAGE, by_nodes=1.0),
        "half": Rule(AVERAGE, by_nodes=1.0, factor=0.5),
        "preset `async`: delayed Nesterov": Rule(preset("async").outer),
        "one node, N times the samples per step": Rule(AVERAGE, gathered=True),
    }


@dataclass(slots=True)
class Node:
    """One node. next_s: when its step under way ends."""

    policy: Sorter
    sync: LayerSync
    link: InProcessLink
    rollouts: Any
    step_s: float
    next_s: float = field(default=0.0)

    def step(self, lr: float) -> None:
        """Land, draw rollouts with the landed weights, and take one inner step on them."""
        self.sync.land()
        batch: Batch = next(self.rollouts)
        set_lr(self.sync.inner, lr)
        loss = find_loss("dppo-tv")(batch.inputs(self.policy), LossSettings()).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.sync.inner.step()
        self.sync.inner.zero_grad()
        self.sync.step()
        self.next_s += self.step_s


def make_nodes(
    start: Sorter, hub: InProcessHub, edit: EditConfig, train: TrainConfig, sizes: Sequence[int], seed: int
) -> list[Node]:
    """Return one node per size, its groups per step; all have entered the run, with prompts of their own."""
    made = []
    for index, groups in enumerate(sizes):
        policy = copy.deepcopy(start)
        link = hub.link(f"node-{index}")
        sync = LayerSync.of(
            policy,
            make_inner(policy, train),
            exchange=HubExchange(link, penalty=edit.penalty, timeout_s=ANSWER_WITHIN_S),
            schedule=make_pace(edit, link.news),
            config=replace(edit, penalty=PenaltyConfig()),
        )
        sync.__enter__()
        rollouts = batches(policy, 1000 * (seed + 1) + index, groups)
        made.append(Node(policy, sync, link, rollouts, STEP_S[index], STEP_S[index]))
    return made


def train(rule: Rule, nodes: int, seed: int, steps: int) -> float:
    """Train one policy with `steps` inner steps of all nodes together; return its solved share in percent."""
    torch.set_num_threads(1)
    config, start, clock = preset("tiny-rl"), warmed_up(seed), VirtualClock()
    plan = HubPlan(
        hub=replace(config.hub, expire_s=1e9, codec="fp32"),
        outer=rule.of(nodes),
        penalty=config.edit.penalty,
        every=config.edit.every,
        pace=config.edit.schedule,
        steps=10**9,
    )
    hub = InProcessHub(plan, layout_of(start), clock=clock)
    sizes = [GROUPS * nodes] if rule.gathered else [GROUPS] * nodes
    inner = rule.train(config.train)
    made = running = make_nodes(start, hub, config.edit, inner, sizes, seed)
    steps = steps * GROUPS // max(sizes)
    for done in range(steps):
        running = [node for node in running if node.link.is_member]  # others have been excluded
        if not running:
            break
        node = min(running, key=lambda node: node.next_s)
        clock.advance_to(node.next_s)
        for other in running:
            other.link.heartbeat(1 / other.step_s)
        hub.tick()
        node.step(lr_at(done / steps, inner, len(running)))
    for node in running:
        if node.link.is_member:
            node.sync.close()  # pushes its last steps
    policy = copy.deepcopy(start)
    adopt_anchors(policy, hub.hub.anchor, made[0].sync)
    return solved(policy)


Grid = dict[tuple[str, int], list[float]]
"""Percent solved by rule and number of nodes, seed by seed."""


def train_all(nodes: Sequence[int], steps: int, seeds: int, processes: int) -> Grid:
    """Return all results. One node alone trains by the preset: its pushes are whole rounds."""
    known = rules()
    cases = [(name, n) for name in known for n in nodes if n > 1 or name == PRESET]
    jobs = [(known[name], n, seed, steps) for name, n in cases for seed in range(seeds)]
    found = in_parallel(train, jobs, processes)
    return {case: found[i * seeds : (i + 1) * seeds] for i, case in enumerate(cases)}


def report(grid: Grid, nodes: Sequence[int], steps: int, seeds: int, decided: bool) -> Report:
    """Return the table and its bars."""
    alone = grid[PRESET, 1]
    rows = [(name, *(_cell(grid.get((name, n))) for n in nodes)) for name in rules()]
    bars = []
    for n in nodes[1:]:
        behind = _mean([one - more for one, more in zip(alone, grid[PRESET, n], strict=True)])
        text = f"{n} nodes end {behind:+.1f} points below one, at most {CLOSE:g}"
        bars.append(Bar(text, behind <= CLOSE if decided else None))
    edit, power = preset("tiny-rl").edit, preset("tiny-rl").train.lr_by_nodes
    method = (
        "Sorting of four digits by a network of 28 thousand parameters, Adam as in the preset but at"
        f" {LR:g}, on N nodes times N^{power:g} where the row says preset; {GROUPS} groups of 8 rollouts per"
        f" step, {steps} steps of all nodes together, {seeds} seeds.",
        "A step takes 1, 1, 1.5, 2, 1, 1, 1.5, 2 s of virtual time; a push every"
        f" {edit.every:g} steps of the fastest. Solved share of 4096 held-out samples in percent, mean +-"
        " half of its 95 % interval.",
    )
    figures = {f"{name}, {n}": values for (name, n), values in grid.items()}
    columns = ("an arrival counts as", *(f"{n} node{'s' * (n > 1)}" for n in nodes))
    return Report(
        "Solved share by nodes, at equal samples", method, columns, tuple(rows), tuple(bars), figures
    )


def _mean(values: list[float]) -> float:
    return mean_and_half_width(values)[0]


def _cell(values: list[float] | None) -> str:
    if values is None:
        return ""
    mean, half = mean_and_half_width(values)
    return f"{mean:.1f} +- {half:.1f}"


def measure(args: argparse.Namespace) -> Report:
    """Train and report."""
    nodes = (1, 2) if args.quick else NODES
    steps, seeds = (60, 2) if args.quick else (STEPS, args.seeds)
    return report(train_all(nodes, steps, seeds, args.processes), nodes, steps, seeds, not args.quick)


def options(parser: argparse.ArgumentParser) -> Any:
    """Add the options of this benchmark."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)


if __name__ == "__main__":
    main("rl_nodes", ABOUT, measure, options=options)
