"""Run one node of `benchmarks.bandwidth` over a hub: a process in a network namespace, at a given pace.

It prints "ready" once it is a member, begins when a line comes in, and prints one JSON line at the end.
"""

import json
import sys
from dataclasses import asdict, dataclass

import psutil
import torch
from torch import nn

import aedit
from aedit.edit import EditConfig, HubExchange, LayerSync, OwnPace, RoundOutcome
from aedit.proto.agent import AgentPlan, start_agent
from benchmarks.kit.paced import layout_of, tower, walk

RUN = "bandwidth"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubJob:
    """Job of a node."""

    hub: str
    name: str
    interface: str
    codec: str
    steps: int
    every: int
    step_s: float
    width: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes through the interface so far, with headers."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class HubSeen:
    """Results of a node. wall_s, waited_s: until its last step ended; the rest until it had left."""

    wall_s: float
    waited_s: float
    before: Traffic
    after: Traffic
    params: int
    """Number of parameters of the model."""
    params_pushed: int
    """Parameters in all pushes; as many came back in each answer."""
    refused: int
    """Pushes of units that did not count."""


def run(job: HubJob) -> HubSeen:
    """Train at a fixed pace as a member of the hub's run."""
    torch.manual_seed(0)
    model = tower(job.width, job.num_layers)
    link = start_agent(agent_plan(job, model), ranks=1)
    try:
        sync = LayerSync.of(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            exchange=HubExchange(link, timeout_s=TIMEOUT_S),
            schedule=OwnPace(job.every),
            config=EditConfig(every=job.every, landing="arrival"),
        )
        return _watched(job, sync)
    finally:
        link.stop()


def agent_plan(job: HubJob, model: nn.Module) -> AgentPlan:
    """Return the plan of an agent whose node has no data of its own."""
    return AgentPlan(
        addresses=(job.hub,),
        name=job.name,
        run=RUN,
        version=aedit.__version__,
        units=layout_of(model).units,
        num_samples=1_000_000,
        codec=job.codec,
        codec_down=job.codec,
    )


def _watched(job: HubJob, sync: LayerSync) -> HubSeen:
    marks: list[Traffic] = []
    landed: list[RoundOutcome] = []

    def mark() -> None:
        counters = psutil.net_io_counters(pernic=True)[job.interface]
        marks.append(Traffic(counters.bytes_sent, counters.bytes_recv))

    def begin() -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        mark()

    sync.on_round = lambda outcome, waited_s: landed.append(outcome)
    walked = walk(sync, [job.step_s] * job.steps, lambda sync: sync.steps < job.steps, begin)
    mark()
    numels = [sum(p.numel() for p in unit.params) for unit in sync.units]
    pushed = [i for outcome in landed if outcome.round.steps for i in outcome.units]
    return HubSeen(
        wall_s=walked.ends_s[-1],
        waited_s=walked.waited_s,
        before=marks[0],
        after=marks[1],
        params=sum(numels),
        params_pushed=sum(numels[i] for i in pushed),
        refused=sum(len(outcome.refused) + len(outcome.distrusted) for outcome in landed),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asdict(run(HubJob(**json.loads(sys.argv[1]))))))
