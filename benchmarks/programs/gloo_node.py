"""Run one node of `benchmarks.bandwidth`: a process in a network namespace. Prints one JSON line."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from aedit.edit import EditConfig, LayerSync, MeanExchange
from aedit.proto.transports import TorchTransport
from benchmarks.kit.paced import tower, walk

PORT = 29500
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a node."""

    method: str
    steps: int
    every: int
    step_s: float
    width: int
    num_layers: int
    rank: int
    nodes: int
    interface: str
    store: str
    """Address of the first node."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of a node until its last step ended."""

    wall_s: float
    waited_s: float
    wire_bytes: int
    """Sent through the interface, headers and all."""
    payload_bytes: int
    rounds: int
    params: int


def config(method: str, every: int) -> EditConfig:
    """Return the preset `method` with rounds every `every` steps."""
    match method:
        case "ddp":
            return EditConfig(warmup_steps="all")
        case "edit":
            return EditConfig(every=every)
        case "streaming":
            return EditConfig(every=every, fragments=4, landing="arrival")
    raise ValueError(f"no such method: {method}")


def run(job: Job) -> Seen:
    """Train at a fixed pace, together with all nodes of the job."""
    os.environ |= {"GLOO_SOCKET_IFNAME": job.interface, "MASTER_ADDR": job.store}
    print("ready", flush=True)
    sys.stdin.readline()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.store}:{PORT}",
        rank=job.rank,
        world_size=job.nodes,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    transport = TorchTransport(timeout_s=TIMEOUT_S)
    torch.manual_seed(0)
    model = tower(job.width, job.num_layers)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(transport), config=config(job.method, job.every))
    seen = _watched(job, sync, transport)
    transport.close()
    dist.barrier()  # the first node serves the stores: it goes last
    dist.destroy_process_group()
    return seen


def _watched(job: Job, sync: LayerSync, transport: TorchTransport) -> Seen:
    marks: list[tuple[int, int]] = []  # bytes on the wire and of payload: at the start, at the end

    def mark() -> None:
        marks.append((psutil.net_io_counters(pernic=True)[job.interface].bytes_sent, transport.bytes_sent))

    def begin() -> None:
        dist.barrier()
        mark()

    def goes_on(sync: LayerSync) -> bool:
        if sync.steps < job.steps:
            return True
        mark()
        return False

    walked = walk(sync, [job.step_s] * job.steps, goes_on, begin)
    (wire_before, payload_before), (wire, payload) = marks
    rounds = job.steps if job.method == "ddp" else job.steps * sync.config.fragments // job.every
    params = sum(p.numel() for p in sync.model.parameters())
    wall_s = walked.ends_s[-1]
    return Seen(wall_s, walked.waited_s, wire - wire_before, payload - payload_before, rounds, params)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asdict(run(Job(**json.loads(sys.argv[1]))))))
