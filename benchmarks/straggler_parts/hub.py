"""The straggler benchmark with a hub: real processes, and the shipped presets at this benchmark's speed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from aedit.async_sgd.rules.config import PushFilterConfig
from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import to_toml
from aedit.launch.config.load import load
from benchmarks.kit.cluster import ask, free_port
from benchmarks.straggler_parts.node import Job

ROOT = Path(__file__).parents[2]
PRESETS = ("async", "a-edit-hub")
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What the nodes are like, and which of them is frozen for how long in the middle."""

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
    """`scene` with `preset`, every interval of which lasts about `every_s`."""
    with tempfile.TemporaryDirectory() as name:
        config = _scaled(preset, Path(name), min(scene.steps_s), every_s)
        run_toml = Path(name) / "run.toml"
        run_toml.write_text(to_toml(config))
        processes = [_popen("aedit.launch.cli", "hub", str(run_toml), f"--directory={name}/hub")]
        try:
            _until_up(config.hub.address)
            jobs = [_job(config, run_toml, i, step_s, seconds) for i, step_s in enumerate(scene.steps_s)]
            nodes = [_popen("benchmarks.straggler_parts.node", json.dumps(asdict(job))) for job in jobs]
            processes += nodes
            return _walk(scene, nodes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


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
            address=f"127.0.0.1:{free_port()}",
            push_filter=PushFilterConfig(threshold=1e9, clip=None, cosine=False),
        ),
    )


def _job(config: RunConfig, run_toml: Path, index: int, step_s: float, seconds: float) -> Job:
    return Job(
        run_toml=str(run_toml),
        hub=config.hub.address,
        index=index,
        step_s=step_s,
        solo_s=min(5.0, seconds),
        seconds=seconds,
    )


def _walk(scene: Scene, nodes: "Sequence[subprocess.Popen[str]]", seconds: float) -> Seen:
    for node in nodes:
        _expect(node, "ready")
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write("go\n")
        node.stdin.flush()
    if scene.frozen is not None:
        time.sleep((seconds - scene.frozen_s) / 2)
        _signal(nodes[scene.frozen], signal.SIGSTOP)
        time.sleep(scene.frozen_s)
        _signal(nodes[scene.frozen], signal.SIGCONT)
    told = [json.loads(_line(node)) for node in nodes]
    joint, alone = [one["joint"] for one in told], [one["solo"] for one in told]
    return Seen(
        tuple(_speed(one) for one in alone),
        tuple(_speed(one) for one in joint),
        tuple(one["waited_s"] / one["wall_s"] for one in joint),
        tuple(len(one["ends_s"]) for one in joint),
        max(one["wall_s"] for one in joint),
    )


def _speed(walk: dict[str, Any]) -> float:
    return len(walk["ends_s"]) / float(walk["ends_s"][-1])


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """To the trainer and its agent."""
    top = psutil.Process(process.pid)
    for one in (top, *top.children(recursive=True)):
        one.send_signal(number)


def _expect(process: "subprocess.Popen[str]", word: str) -> None:
    line = _line(process)
    assert line == word, f"expected {word!r}, got {line!r}"


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _popen(module: str, *words: str) -> "subprocess.Popen[str]":
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", module, *words], cwd=ROOT, env=env, **pipes)  # type: ignore[call-overload,no-any-return]


def _until_up(address: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while ask(address) is None:
        assert time.monotonic() < deadline, f"the hub at {address} did not answer within {LIMIT_S:g} s"
        time.sleep(0.05)
