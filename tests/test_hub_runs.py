"""Whole runs with a hub, as a person starts them: real processes, torchrun and all."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from aedit.launch.hub.replay import anchors_of, pushes_of

LIMIT_S = 110

TOML = """
name = "x"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
source = "{directory}/text.txt"
seq_len = 32
held_out = 0.3
[train]
steps = {steps}
batch_size = 2
eval_samples = 4
[edit]
every = 4
landing = "arrival"
[outer]
lr = 0.7
momentum = 0.5
[hub]
address = "{address}"
quorum = {quorum}
pace = "{pace}"
heartbeat_s = 0.1
expire_s = 3.0
lease_samples = 64
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Place:
    """A directory with a configuration, and the commands started there."""

    def __init__(self, directory):
        self.directory, self.started = directory, []
        self.toml = directory / "run.toml"
        (directory / "text.txt").write_text("one two three four five six seven " * 2000)

    def configure(self, steps, *, address="127.0.0.1:0", quorum=1, pace="dylu"):
        text = TOML.format(
            directory=self.directory, steps=steps, address=address, quorum=json.dumps(quorum), pace=pace
        )
        self.toml.write_text(text)

    def aedit(self, *words):
        command = [sys.executable, "-m", "aedit.launch.cli", *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=env, **pipes)
        self.started.append(process)
        return process

    def processes(self, *marks):
        """Processes that have all of `marks` in their command."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.directory) in line and all(mark in line for mark in marks):
                found.append(process)
        return found

    def events(self, node, run_dir=None):
        path = (run_dir or self.directory / "runs" / "x") / "nodes" / str(node) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self):
        for process in self.started:
            process.kill()
            process.communicate()
        for process in self.processes():
            process.kill()


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.end()


def ends_well(process):
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return out


def until(true, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def steps_in(events, kind):
    return [event["step"] for event in events if event["event"] == kind]


def test_a_local_run_has_a_hub_and_a_torchrun_per_node_and_ends_with_a_report(place):
    place.configure(24)
    out = ends_well(place.aedit("run", place.toml, "--local", 2, f"--dir={place.directory}/runs"))
    assert "run x: 2 nodes" in out
    assert "held-out loss" in out
    for node in (0, 1):
        assert place.events(node)[-1]["reason"] == "done"
    hub = place.directory / "runs" / "x" / "hub"
    pushed = Counter()
    for push in pushes_of(hub):
        pushed[push.node] += push.steps if push.unit == 0 else 0
    # One may have used up the budget before the other was there.
    assert [steps_in(place.events(node), "stop")[-1] for node in (0, 1)] == [pushed[0], pushed[1]]
    assert len(anchors_of(hub)) == 3
    assert place.processes() == []
    ends_well(place.aedit("export", place.directory / "runs" / "x", place.directory / "out"))
    model = AutoModelForCausalLM.from_pretrained(place.directory / "out")
    anchors = torch.cat([torch.from_numpy(values.copy()) for _, values in sorted(anchors_of(hub).items())])
    exported = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(exported.sort().values, anchors.sort().values), "the anchors, bit for bit"


def test_a_run_goes_on_when_its_hub_and_a_node_are_killed(place):
    place.configure(1500)
    run = place.aedit("run", place.toml, "--local", 2, f"--dir={place.directory}/runs")
    until(lambda: any(steps_in(place.events(n), "round") for n in (0, 1)), "the first round")
    (hub,) = place.processes("aedit.launch.cli hub")
    hub.kill()
    until(lambda: place.processes("aedit.launch.cli hub") not in ([], [hub]), "the hub to be back")
    before = len(steps_in(place.events(1), "round"))
    until(lambda: len(steps_in(place.events(1), "round")) > before, "node 1 to be answered again")
    assert len([event for event in place.events(1) if event["event"] == "start"]) == 1, (
        "not because of the hub"
    )
    victim = max(place.processes("aedit.launch.node", "--name=local-1"), key=lambda p: p.create_time())
    victim.kill()
    ends_well(run)
    starts = [event["attempt"] for event in place.events(1) if event["event"] == "start"]
    assert starts == [1, 2]
    assert place.events(0)[-1]["reason"] == place.events(1)[-1]["reason"] == "done"


def test_nodes_join_with_nothing_but_an_address_and_one_leaves_with_ctrl_c(place):
    address = f"127.0.0.1:{free_port()}"
    place.configure(200, address=address)
    hub = place.aedit("hub", place.toml, f"--dir={place.directory}/hub")
    until(lambda: (place.directory / "hub/x/hub/address").exists(), "the hub")
    nodes = [
        place.aedit("join", address, f"--dir={place.directory}/{name}", "--device=cpu", f"--as={name}")
        for name in ("a", "b")
    ]

    def seen(name):
        return [n for n in (0, 1) if place.events(n, place.directory / name / "x")]

    until(lambda: seen("a") and seen("b"), "both nodes")
    assert seen("a") != seen("b"), "each has its own number"
    (index,) = seen("a")
    here = place.directory / "a" / "x"
    until(lambda: steps_in(place.events(index, here), "round"), "a round of the first")
    status = place.aedit("status", address)
    shown = ends_well(status)
    assert "training" in shown or "tra" in shown
    nodes[0].send_signal(signal.SIGINT)
    nodes[0].communicate(timeout=LIMIT_S)
    assert nodes[0].returncode == 130
    assert place.events(index, here)[-1]["reason"] == "signal"
    ends_well(nodes[1])
    ends_well(hub)
    steps = sum(push.steps for push in pushes_of(place.directory / "hub/x/hub") if push.node == index)
    assert steps == 3 * place.events(index, here)[-1]["step"], "everything it had learned was pushed"


def test_who_cannot_join_is_told_why_in_one_line(place):
    nobody = place.aedit("join", f"127.0.0.1:{free_port()}", f"--dir={place.directory}/n")
    _, err = nobody.communicate(timeout=LIMIT_S)
    assert nobody.returncode == 2
    assert err.startswith("aedit: 127.0.0.1:")
    assert err.count("\n") == 1
    assert not (place.directory / "n").exists()
    away = place.aedit("join", "198.51.100.1:7000", f"--dir={place.directory}/n")
    _, err = away.communicate(timeout=LIMIT_S)
    assert away.returncode == 2
    assert "--keys" in err
