"""Compare the throughput of unequal nodes in one run with what they reach alone.

Bars: A-EDiT >= 95 % and >= 93 %; with a hub >= 97 %, and the others lose < 1 % while one is frozen. Threads
of a fixed pace over a `MemoryWorld`, or processes over a hub, with the real `LayerSync`. The throughput of a
node alone is measured in the same harness; with threads over exactly the steps, random delays included, that
it took together with the others.
"""

import copy
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import torch
from torch import nn

from aedit.async_sgd.rules import PushFilterConfig
from aedit.edit import EditConfig, LayerSync, MeanExchange, PenaltyConfig
from aedit.launch.config import RunConfig, load, to_toml
from aedit.proto.transports import MemoryWorld
from benchmarks.kit.paced import Pace, Walk, together, tower, walk
from benchmarks.kit.processes import ROOT, hub, run_jobs
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.straggler_node import Job

# -- straggler benchmark with a hub: real processes, and the shipped presets at this benchmark's speed


PRESETS = ("async", "a-edit-hub")


@dataclass(frozen=True, slots=True)
class Scene:
    """Speeds of the nodes, and which of them is frozen for how long in the middle."""

    name: str
    steps_s: tuple[float, ...]
    frozen: int | None = None
    frozen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Steps per second of each node, alone and together, and the share of its time it waited."""

    alone: tuple[float, ...]
    joint: tuple[float, ...]
    waited: tuple[float, ...]
    steps: tuple[int, ...]
    wall_s: float

    @property
    def share(self) -> float:
        return sum(self.joint) / sum(self.alone)

    def share_without(self, node: int) -> float:
        others = [i for i in range(len(self.alone)) if i != node]
        return sum(self.joint[i] for i in others) / sum(self.alone[i] for i in others)


def run_scene(scene: Scene, preset: str, seconds: float, every_s: float) -> Seen:
    """Run `scene` with `preset`, every interval of which lasts about `every_s`."""

    def freeze(nodes: "list[subprocess.Popen[str]]") -> None:
        if scene.frozen is not None:
            time.sleep((seconds - scene.frozen_s) / 2)
            _signal(nodes[scene.frozen], signal.SIGSTOP)
            time.sleep(scene.frozen_s)
            _signal(nodes[scene.frozen], signal.SIGCONT)

    with tempfile.TemporaryDirectory() as name:
        toml = to_toml(_scaled(preset, Path(name), min(scene.steps_s), every_s))
        with hub(Path(name), toml) as process:
            jobs = [
                Job(
                    run_toml=f"{name}/run.toml",
                    hub=process.address,
                    index=index,
                    step_s=step_s,
                    solo_s=min(5.0, seconds),
                    seconds=seconds,
                )
                for index, step_s in enumerate(scene.steps_s)
            ]
            told = run_jobs("benchmarks.programs.straggler_node", jobs, meanwhile=freeze)
    joint, alone = [one["joint"] for one in told], [one["solo"] for one in told]
    return Seen(
        tuple(_speed(one) for one in alone),
        tuple(_speed(one) for one in joint),
        tuple(one["waited_s"] / one["wall_s"] for one in joint),
        tuple(len(one["ends_s"]) for one in joint),
        max(one["wall_s"] for one in joint),
    )


def _scaled(preset: str, directory: Path, step_s: float, every_s: float) -> RunConfig:
    config = load(ROOT / "configs" / f"{preset}.toml", []).config
    timed = config.edit.schedule == "seconds"
    every = every_s if timed else round(every_s / step_s)
    return replace(
        config,
        name="x",
        dir=str(directory),
        edit=replace(config.edit, every=every),
        train=replace(config.train, steps=10**9),
        # The towers hardly learn, so that the sizes of their pseudo-gradients are mostly rounding.
        hub=replace(
            config.hub,
            address="127.0.0.1:0",
            push_filter=PushFilterConfig(threshold=1e9, clip=None, cosine=False),
        ),
    )


def _speed(walk: dict[str, Any]) -> float:
    return len(walk["ends_s"]) / float(walk["ends_s"][-1])


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send the signal to the trainer and its agent."""
    top = psutil.Process(process.pid)
    for one in (top, *top.children(recursive=True)):
        one.send_signal(number)


# -- measurements, tables and bars


STEP_S = 0.02
WORLD_TIMEOUT_S = 60.0
SCENES = {
    "speeds 1, 1, 1, 0.25": (Pace(STEP_S),) * 3 + (Pace(4 * STEP_S),),
    "random 5x, p = 0.1": (Pace(STEP_S, chance=0.1, factor=5.0),) * 4,
}
HUB_BAR = 0.97
BARS = {"speeds 1, 1, 1, 0.25": 0.95, "random 5x, p = 0.1": 0.93}


@dataclass(frozen=True, slots=True)
class Length:
    """Duration and sizes of the benchmark."""

    steps: dict[str, int]
    """Of the methods that count steps, by scene."""
    every_s: float
    rounds: int
    """A-EDiT ends with this many."""
    scale: int
    """Presets' intervals in steps are divided by it."""
    hub_s: float
    """How long the scenes with a hub last; an interval is a tenth of it."""


FULL = Length(
    {"speeds 1, 1, 1, 0.25": 256, "random 5x, p = 0.1": 512}, every_s=8.0, rounds=3, scale=4, hub_s=40.0
)
QUICK = Length(
    {"speeds 1, 1, 1, 0.25": 16, "random 5x, p = 0.1": 16}, every_s=0.3, rounds=2, scale=32, hub_s=3.0
)


@dataclass(frozen=True, slots=True)
class Method:
    """A preset at the speed of this benchmark."""

    name: str
    config: EditConfig
    goes_on: Callable[[LayerSync], bool]


def measure(quick: bool) -> Report:
    torch.set_num_threads(1)
    length = QUICK if quick else FULL
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    for scene, paces in SCENES.items():
        solo = _solo(paces, length.every_s * (length.rounds + 0.5))
        shares: dict[str, object] = {"solo": [asdict(w) for w in solo]}
        figures[scene] = shares
        for method in methods(length, scene):
            walks = _group(paces, method)
            alone = sum(s.speed(w.steps) for s, w in zip(solo, walks, strict=True))
            share = sum(w.steps for w in walks) / max(w.wall_s for w in walks) / alone
            rows.append(_row(scene, method.name, walks, alone, share))
            shares[method.name] = {"share": share, "nodes": [asdict(w) for w in walks]}
            if method.name == "a-edit":
                text = f"{scene}: a-edit {percent(share)} of the solo sum, bar {percent(BARS[scene], 0)}"
                bars.append(Bar(text, None if quick else share >= BARS[scene]))
    for there in hub_scenes(quick):
        for preset in PRESETS[:1] if quick else PRESETS:
            seen = run_scene(there, preset, length.hub_s, length.hub_s / 10)
            rows.append(_hub_row(there, preset, seen))
            bars.append(_hub_bar(there, preset, seen, quick))
            figures[f"{there.name}, {preset}"] = asdict(seen)
    return Report(
        "stragglers, 4 nodes",
        (
            f"Steps of {1e3 * STEP_S:.0f} ms that end at a deadline; edit {128 // length.scale} and diloco"
            f" {500 // length.scale} steps, a-edit {length.every_s:g} s; walls include leaving together.",
            "Solo: same nodes without exchange, same steps and random delays. Share: joint by solo steps/s."
            " Late: too slow.",
        ),
        ("cluster", "method", "steps per node", "wall s", "waiting", "steps/s", "solo sum", "share", "late"),
        tuple(rows),
        tuple(bars),
        figures,
    )


def hub_scenes(quick: bool) -> list[Scene]:
    """Unequal nodes, and one of them frozen for half of the time (20 s)."""
    unequal = (STEP_S, STEP_S, STEP_S, 4 * STEP_S)
    frozen_s = 1.0 if quick else 20.0
    return [
        Scene("hub: 1, 1, 1, 0.25", unequal),
        Scene(f"hub: frozen {frozen_s:g} s", unequal, frozen=1, frozen_s=frozen_s),
    ]


def _hub_row(scene: Scene, preset: str, seen: Seen) -> tuple[str, ...]:
    share = seen.share if scene.frozen is None else seen.share_without(scene.frozen)
    spread = f"{min(seen.steps)} to {max(seen.steps)}"
    speeds = (f"{sum(seen.joint):.1f}", f"{sum(seen.alone):.1f}", percent(share))
    waiting = percent(sum(seen.waited) / len(seen.waited))
    return (scene.name, preset, spread, f"{seen.wall_s:.1f}", waiting, *speeds, "-")


def _hub_bar(scene: Scene, preset: str, seen: Seen, quick: bool) -> Bar:
    if scene.frozen is None:
        text, passed = (
            f"{percent(seen.share)} of the solo sum, bar {percent(HUB_BAR, 0)}",
            seen.share >= HUB_BAR,
        )
    else:
        share = seen.share_without(scene.frozen)
        text, passed = f"the others do {percent(share)} of what they do alone, bar 99 %", share >= 0.99
    return Bar(f"{scene.name}: {preset} {text}", None if quick else passed)


def methods(length: Length, scene: str) -> list[Method]:
    """Return the four methods, at this benchmark's speed."""
    plain = PenaltyConfig(weights="uniform", detector="off", clip=None)
    steps = length.steps[scene]
    diloco = EditConfig(every=500 // length.scale, units="model", penalty=plain)
    a_edit = EditConfig(schedule="seconds", every=length.every_s, penalty=PenaltyConfig(step_weight=0.5))
    return [
        Method("ddp", EditConfig(warmup_steps="all"), lambda sync: sync.steps < steps),
        Method("diloco", diloco, lambda sync: sync.steps < steps),
        Method("edit", EditConfig(every=128 // length.scale), lambda sync: sync.steps < steps),
        Method("a-edit", a_edit, lambda sync: sync.schedule.last_id < length.rounds),
    ]


def _solo(paces: tuple[Pace, ...], seconds: float) -> list[Walk]:
    """Every node with nobody to wait for and no rounds; all at once, for the same noise as in company."""
    ready = Barrier(len(paces), timeout=WORLD_TIMEOUT_S)

    def alone(node: int) -> Walk:
        pace = paces[node]
        sync = _sync(tower(), MemoryWorld(1), 0, EditConfig(every=10**9))
        return walk(sync, _durations_s(node, pace), lambda s: s.steps * pace.step_s < seconds, ready.wait)

    return together(len(paces), alone)


def _group(paces: tuple[Pace, ...], method: Method) -> list[Walk]:
    world = MemoryWorld(len(paces), timeout_s=WORLD_TIMEOUT_S)
    ready = Barrier(len(paces), timeout=WORLD_TIMEOUT_S)
    model = tower()
    syncs = [_sync(copy.deepcopy(model), world, node, method.config) for node in range(len(paces))]
    return together(
        len(paces),
        lambda node: walk(syncs[node], _durations_s(node, paces[node]), method.goes_on, ready.wait),
    )


def _sync(model: nn.Module, world: MemoryWorld, node: int, config: EditConfig) -> LayerSync:
    exchange = MeanExchange(world.node(node), penalty=config.penalty)
    return LayerSync.of(model, torch.optim.SGD(model.parameters(), lr=1e-3), exchange=exchange, config=config)


def _durations_s(node: int, pace: Pace) -> list[float]:
    return pace.durations_s(seed=node, num_steps=100_000)


def _row(scene: str, name: str, walks: list[Walk], alone: float, share: float) -> tuple[str, ...]:
    wall_s = max(w.wall_s for w in walks)
    waiting = sum(w.waited_s for w in walks) / sum(w.wall_s for w in walks)
    steps = [w.steps for w in walks]
    spread = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    speeds = (f"{sum(steps) / wall_s:.1f}", f"{alone:.1f}", percent(share))
    late = percent(sum(w.late for w in walks) / sum(steps))
    return (scene, name, spread, f"{wall_s:.1f}", percent(waiting), *speeds, late)


if __name__ == "__main__":
    main("straggler", "Aggregate speed of unequal nodes, as a share of what they do alone.", measure)
