"""A version over a thin wire: from its publication at one end to its first use by an engine at the other.

As a program, one end of the wire: `python -m benchmarks.programs.version_wire JOB`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aedit.proto.rpc import Server
from aedit.proto.versions import (
    Patterns,
    Receiving,
    VersionLayout,
    VersionsClient,
    VersionsCore,
    VersionStore,
    versions_service,
)
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.server import EngineHost, version_tensors
from aedit.types import Layout, TensorLayout, UnitLayout
from benchmarks.kit import tun_link
from benchmarks.kit.netns import Place
from benchmarks.kit.processes import Dialogue, end
from benchmarks.kit.tun_link import Wire
from benchmarks.policies import Policy, new_model

LINE, PORT = "run", 7200
DELAY_S = 0.04
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """Settings of one end. versions: file with an array of versions, a row each."""

    sends: bool
    address: str
    versions: str
    policy: dict[str, Any]
    dense: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """Seconds from the publication of a version, and the bytes that came, with headers."""

    fetched_s: float
    used_s: float
    num_bytes: int


def measure(versions: Sequence[Patterns], policy: Policy, rate_mbit: float, dense: bool) -> list[Arrival]:
    """Publish one version after the other, each when the last one is in use at the other end."""
    wire = Wire(delay_s=DELAY_S, rate_mbit=rate_mbit)
    with tempfile.TemporaryDirectory(prefix="aedit-") as name, tun_link.link(wire) as (here, there):
        file = Path(name) / "versions.npy"
        np.save(file, np.stack(versions))
        job = Job(True, f"{here.address}:{PORT}", str(file), asdict(policy), dense)
        with _end(job, here) as sender, _end(replace(job, sends=False), there) as receiver:
            for end_of_wire in (sender, receiver):
                end_of_wire.await_ready()
            arrivals = []
            for number in range(len(versions)):
                before = tun_link.counted(there).received
                published_s = sender.ask("publish")
                fetched_s, used_s = receiver.ask("follow")
                num_bytes = tun_link.counted(there).received - before
                if number:  # the first one is there before the run
                    arrivals.append(Arrival(fetched_s - published_s, used_s - published_s, num_bytes))
            return arrivals


@contextmanager
def _end(job: Job, place: Place) -> Iterator[Dialogue]:
    dialogue = Dialogue.start(__name__, json.dumps(asdict(job)), place=place)
    try:
        yield dialogue
    finally:
        end([dialogue.process])


# -- in the processes


def main(job: Job) -> None:
    """Answer each line of stdin with one of stdout. Times are those of the machine's monotonic clock."""
    torch.set_num_threads(1)
    model = new_model(Policy(**job.policy))
    model.train(False)
    sizes = [(name, p.shape) for name, p in model.named_parameters()]
    tensors = tuple(TensorLayout(name, tuple(shape)) for name, shape in sizes)
    layout = VersionLayout(Layout((UnitLayout("all", tensors),)), "bf16")
    (_send if job.sends else _receive)(job, layout, model)


def _send(job: Job, layout: VersionLayout, model: Any) -> None:
    store, values = VersionStore(layout), np.load(job.versions)
    store.open(LINE)
    server = Server([versions_service(VersionsCore(store, lambda line, caller: False))], job.address)
    for serial, _ in _asked():
        began_s = time.monotonic()
        store.publish(LINE, serial, {"all": values[serial - 1]})
        print(json.dumps(began_s), flush=True)
    server.stop(0.0)


def _receive(job: Job, layout: VersionLayout, model: Any) -> None:
    store, client = VersionStore(layout, ring=2), VersionsClient(job.address, call_timeout_s=LIMIT_S)
    host = EngineHost()
    host.open(LINE, lambda: Engine.of(model, rows=1, max_tokens=64))
    store.open(LINE)
    for serial, _ in _asked():
        manifest = client.newest(LINE, after=serial - 1, wait_s=20.0)
        assert manifest is not None
        if job.dense:
            store.close(LINE)  # no base
            store.open(LINE)
        receiving = Receiving(store, manifest)
        client.fetch(receiving)
        receiving.finish()
        fetched_s = time.monotonic()
        host.swap(LINE, partial(_tensors, store, manifest.serial), manifest.serial).result(LIMIT_S)
        print(json.dumps([fetched_s, time.monotonic()]), flush=True)
    host.close()
    client.close()


def _tensors(store: VersionStore, serial: int) -> dict[str, Tensor]:
    with store.hold(LINE, serial) as units:
        return version_tensors(store.layout, units, torch.float32, torch.device("cpu"))


def _asked() -> Iterator[tuple[int, str]]:
    print("ready", flush=True)
    return enumerate(sys.stdin, 1)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
