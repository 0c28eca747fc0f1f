"""Run one node of the straggler benchmark with a hub: LayerSync, an agent, and steps of a fixed pace.

    python -m benchmarks.programs.straggler_node '{"run_toml": ..., "hub": ..., "index": ..., ...}'

Says "ready" when it is a member, begins when it reads "go", and prints its Walk as JSON.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aedit.edit import EditConfig, HubExchange, LayerSync, MeanExchange, make_pace
from aedit.launch.config import JoinOptions, RunConfig, load
from aedit.launch.node import agent_plan
from aedit.proto.agent import AgentLink, Progress, start_agent
from aedit.proto.transports import MemoryWorld
from benchmarks.kit.paced import Pace, Walk, tower, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of one process."""

    run_toml: str
    hub: str
    index: int
    step_s: float
    solo_s: float
    """It first walks alone for so long."""
    seconds: float


def main(words: list[str]) -> int:
    job = Job(**json.loads(words[0]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load(Path(job.run_toml), []).config
    solo = _solo(job)
    model = tower()
    link = _link(job, config, model)
    sync = _sync(config, model, link)
    sync.anchor()
    _say("ready")
    sys.stdin.readline()
    began = time.monotonic()

    def goes_on(sync: LayerSync) -> bool:
        link.tell(Progress(steps=sync.steps, busy_s=sync.steps * job.step_s, wait_s=sync.waited_s))
        return time.monotonic() - began < job.seconds

    joint = walk(sync, _durations_s(job), goes_on, lambda: None)
    _say(json.dumps({"solo": asdict(solo), "joint": asdict(joint)}))
    return 0


def _solo(job: Job) -> Walk:
    """Run the same node alone and without rounds."""
    model = tower()
    config = EditConfig(every=10**9)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(MemoryWorld(1).node(0)), config=config)
    steps = int(job.solo_s / job.step_s)
    return walk(sync, _durations_s(job), lambda sync: sync.steps < steps, lambda: None)


def _link(job: Job, config: RunConfig, model: torch.nn.Module) -> AgentLink:
    member = JoinOptions(hub=job.hub, name=f"node-{job.index}", prefers=job.index)
    return start_agent(agent_plan(config, member, model, {}, 10**6), ranks=1)


def _sync(config: RunConfig, model: torch.nn.Module, link: AgentLink) -> LayerSync:
    exchange = HubExchange(link, max_steps_ahead=config.hub.max_steps_ahead, penalty=config.edit.penalty)
    schedule = make_pace(config.edit, link.news)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    return LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config.edit)


def _durations_s(job: Job) -> list[float]:
    return Pace(job.step_s).durations_s(seed=job.index, num_steps=100_000)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
