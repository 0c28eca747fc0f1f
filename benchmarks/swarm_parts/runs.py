"""Runs of `aedit run --local`: the swarm, and its peers averaging by hivemind."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.records import NodeRecords, read_run
from benchmarks.kit.processes import end, start
from benchmarks.swarm_parts.outcome import Outcome, PeerOutcome
from benchmarks.swarm_parts.traffic import Traffic

ENDS_WITHIN_S = 240.0
"""After the time of training: start, last round, evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Sizes that all ways of training share."""

    seconds: float = 90.0
    every_s: float = 10.0
    slowdown: tuple[float, ...] = (4.0, 4.0, 8.0, 12.0)
    """Of the peers' steps, one per peer: so they leave cores free, as machines of their own would have."""
    hidden_size: int = 64
    layers: int = 4
    batch_size: int = 4
    seq_len: int = 128
    lr: float = 3e-3
    eval_samples: int = 64


COMMON = """
name = "{name}"
dir = "{directory}"
device = "cpu"
[model]
sizes = {{ hidden_size = {hidden}, intermediate_size = {wide}, num_hidden_layers = {layers}, \
num_attention_heads = 4, num_key_value_heads = 4, tie_word_embeddings = true }}
[data]
source = "stdlib"
tokenizer = "byte"
seq_len = {seq_len}
[train]
steps = 10000000
seconds = {seconds}
batch_size = {batch_size}
lr = {lr}
lr_final = 1.0
eval_samples = {eval_samples}
[edit]
schedule = "seconds"
every = {every}
landing = "{landing}"
[checkpoint]
every = 0
[local]
slowdown = {slowdown}
"""
PARTS = """
[edit.penalty]
step_weight = 0.5
[hub]
quorum = "all"
weights = "penalty"
expire_s = 6.0
[swarm]
discovery = "file"
parts = 2
"""
AVERAGES = """
[swarm]
discovery = "hivemind"
exchange = "hivemind"
averaging_s = 30.0
"""


def toml(race: Race, directory: Path, name: str, more: str, landing: str = "arrival") -> Path:
    """Write a configuration, and return its path."""
    path = directory / f"{name}.toml"
    text = COMMON.format(
        name=name,
        directory=directory,
        hidden=race.hidden_size,
        wide=race.hidden_size * 8 // 3 // 8 * 8,
        layers=race.layers,
        seq_len=race.seq_len,
        seconds=race.seconds,
        batch_size=race.batch_size,
        lr=race.lr,
        eval_samples=race.eval_samples,
        every=race.every_s,
        landing=landing,
        slowdown=list(race.slowdown),
    )
    path.write_text(text + more)
    return path


def run(race: Race, directory: Path, name: str, more: str, landing: str = "arrival") -> Outcome:
    """Train with all peers on this machine, and return what they did."""
    config = toml(race, directory, name, more, landing)
    with (directory / f"{name}.log").open("w") as log, Traffic() as traffic:
        words = ("run", str(config), "--local", str(len(race.slowdown)))
        process = start("aedit.launch.cli", *words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(race.seconds + ENDS_WITHIN_S)
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"{name} failed:\n{Path(log.name).read_text()[-4000:]}")
    found = read_run(directory / name)
    peers = tuple(_outcome(node, race) for node in found.nodes)
    differing = sum(each.event == "averages_differ" for node in found.nodes for each in node.notices)
    return Outcome(peers, tuple(traffic.per_peer(len(peers))), differing if found.averages else None)


def _end(process: "subprocess.Popen[str]") -> None:
    """Let `aedit run` end its nodes, then make sure that it has."""
    deadline_s = time.monotonic() + 30.0
    if process.poll() is None:
        process.terminate()
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    end([process])


def _outcome(node: NodeRecords, race: Race) -> PeerOutcome:
    last = node.metrics[-1]
    good_bye_s = race.seconds - race.every_s / 2
    during = [m for m in node.metrics if m.t <= good_bye_s] or [last]
    return PeerOutcome(
        steps=last.step,
        waited_s=during[-1].wait_s,
        wall_s=during[-1].t,
        progress=tuple((m.t, m.tokens) for m in node.metrics),
        losses=tuple((e.t, e.loss) for e in node.evaluations),
        rounds=len(node.rounds),
        failed=sum(len(row.refused) > 0 for row in node.rounds),
    )
