"""A run with a real hub, the founder of its model as a mere client, and `aedit serve` as processes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import torch

from aedit.edit import find_units, flat_layout
from aedit.launch.config import load
from aedit.launch.serve.served_run import ServedRun
from aedit.proto.rpc import hub_pb2 as pb
from kit.hub_processes import Client, HubProcess, ending
from kit.waiting import until

LIMIT_S = 120.0

RUN = """
name = "run"
dir = "{dir}"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = {heads} }}
[data]
seq_len = 64
[train]
steps = {steps}
[prompts]
source = "aedit.spec_rollout.rl.tasks.arithmetic:rows"
[rl.sampling]
max_new_tokens = 32
[drafter]
kind = "{drafter}"
[hub]
address = "127.0.0.1:0"
expire_s = 600.0
quorum = 1
codec = "fp32"
[serve]
rows = 4
lines = 2
{more}
"""


def write_served_run(directory, *, drafter="suffix", steps=100000, heads=2, more=""):
    """Write a configuration file whose run is in `directory`. more: further tables."""
    path = directory / "served.toml"
    path.write_text(RUN.format(dir=directory, drafter=drafter, steps=steps, heads=heads, more=more))
    return path


class Founder(Client):
    """A node that founds the run with the model's own weights, and pushes noise after that."""

    @classmethod
    def of(cls, address, toml):
        run = ServedRun.of(load(toml, []).config)
        units = find_units(run.model, run.config.edit.units)
        found = cls(address, numels=tuple(unit.numel for unit in units))
        found.layout, found.run, found.toml = flat_layout.layout(units), run, toml
        return found

    def request(self, **others):
        layout = [
            pb.Unit(name=u.name, tensors=[pb.Tensor(name=t.name, shape=t.shape) for t in u.tensors])
            for u in self.layout.units
        ]
        request = pb.JoinRequest(who=self.who, name=self.name, layout=layout, num_samples=1000)
        request.facts.update({"seed": "0"} | others)
        return request

    def model(self):
        """Return the run's model with the anchors that the hub has now."""
        units = find_units(self.run.model, self.run.config.edit.units)
        with torch.no_grad():
            for unit, each in enumerate(units):
                flat = torch.from_numpy(self.anchor(unit)[1].copy())
                for p, part in zip(each.params, flat.split([p.numel() for p in each.params]), strict=True):
                    p.copy_(part.view_as(p))
        return self.run.model


class ServeProcess:
    """Process of `aedit serve`."""

    def __init__(self, address, directory, *words, name="s1"):
        self.name, self.folder = name, directory / "run" / "servers" / name
        self.log = directory / f"{name}.log"
        words = [sys.executable, "-m", "aedit.launch.cli", "serve", address, f"--as={name}", *words]
        words += [f"--dir={directory}", "--device=cpu"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=env)

    @property
    def address(self):
        """Return where it serves, once it has said so."""
        self.wait(lambda: self.events("announced"), "the announcement")
        return self.events("announced")[-1]["address"]

    def wait(self, ask, what):
        def asked():
            assert self.process.poll() is None, self.log.read_text()
            return ask()

        return until(asked, what, LIMIT_S, 0.05)

    def lines(self, kind):
        path = self.folder / f"{kind}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def events(self, name):
        return [line for line in self.lines("events") if line["event"] == name]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@contextmanager
def served_run(tmp_path, *, num_servers=1, words=(), **settings):
    """Yield the founder of a run and its servers."""
    toml = write_served_run(tmp_path, **settings)
    servers = []
    with ending():
        hub = HubProcess(toml, tmp_path / "run" / "hub")
        assert hub.address, hub.log.read_text()
        try:
            for i in range(num_servers):
                servers.append(ServeProcess(hub.address, tmp_path, *words, name=f"s{i + 1}"))
            founder = Founder.of(hub.address, toml).found()
            founder.process = hub
            yield founder, servers
        finally:
            for server in servers:
                server.process.kill()
                server.process.wait(LIMIT_S)
