"""Straggler benchmark with a hub: real processes, and the shipped presets at this benchmark's speed."""

import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from aedit.async_sgd.rules import PushFilterConfig
from aedit.launch.config import RunConfig, load, to_toml
from benchmarks.kit.processes import ROOT, hub, run_jobs
from benchmarks.straggler_parts.node import Job

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
            told = run_jobs("benchmarks.straggler_parts.node", jobs, meanwhile=freeze)
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
