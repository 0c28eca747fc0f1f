"""Tests whole runs with a hub from the command line: real processes, with torchrun."""

import contextlib
import json
import signal
import socket
import time
from collections import Counter

import psutil
import pytest
import torch
from kit.places import LIMIT_S, Place, ends_well, steps_in
from kit.waiting import until
from test_traces import collector
from transformers import AutoModelForCausalLM

from aedit.launch.cli import main
from aedit.launch.hub import anchors_of
from aedit.launch.hub.folder import pushes_of
from aedit.proto.rpc import client

pytestmark = pytest.mark.timeout(600)  # a test has several waits

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
schedule = "dylu"
landing = "arrival"
[outer]
lr = 0.7
momentum = 0.5
[hub]
address = "{address}"
quorum = 1
heartbeat_s = 0.1
expire_s = {expire_s}
lease_samples = 64
{more}
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def configure(place, steps, *, address="127.0.0.1:0", expire_s=3.0, more=""):
    place.configure(TOML, steps=steps, address=address, expire_s=expire_s, more=more)


@contextlib.contextmanager
def frozen(process):
    """Stop a node for a while, so that it uses up neither the budget of steps nor the processor."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.end()


def test_a_local_run_ends_with_a_report_and_a_node_that_starts_late_is_told_so_at_once(place):
    """It has a hub, and a torchrun per node; the second node starts when the first is done.

    Nodes that train beside each other: `test_examples.py`, `test_hub_nodes.py` and the slow tests below.
    """
    with collector() as found:
        configure(place, 24, more=f'[traces]\nendpoint = "{found.url}"')
        run = place.aedit("run", place.toml, "--local", 2, f"--dir={place.directory}/runs")
        place.hold_until_the_others_are_done("local-1", [0])
        out = ends_well(run, place)
    assert "run x: 2 nodes" in out
    assert "held-out loss" in out
    assert [place.events(node)[-1]["reason"] for node in range(2)] == ["done"] * 2
    hub = place.directory / "runs" / "x" / "hub"
    pushed = Counter()
    for push in pushes_of(hub):
        pushed[push.node] += push.steps if push.unit == 0 else 0
    stops = [steps_in(place.events(node), "stop")[-1] for node in range(2)]
    assert stops == [pushed[0], 0]
    assert pushed[0] >= 24
    assert pushed[1] == 0
    assert len(anchors_of(hub)) == 3
    for push in (pushes := found.named("push")):
        (sent,) = found.below(push).values()
        services = [span.process["service.name"] for span in (push, sent, found.below(sent)["hub: push"])]
        assert services == ["aedit-node", "aedit-agent", "aedit-hub"]
    assert pushes
    assert place.processes() == []
    assert not list(place.temporary.glob("torchelastic_*")), "folders that nobody deletes"
    assert main(["export", str(place.directory / "runs" / "x"), str(place.directory / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(place.directory / "out")
    anchors = torch.cat([torch.from_numpy(values.copy()) for _, values in sorted(anchors_of(hub).items())])
    exported = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(exported.sort().values, anchors.sort().values), "the anchors, bit for bit"


@pytest.mark.slow
def test_a_run_goes_on_when_its_hub_and_a_node_are_killed(place):
    configure(place, 200, expire_s=600.0)
    run = place.aedit("run", place.toml, "--local", 2, f"--dir={place.directory}/runs")

    def rounds(node):
        return len(steps_in(place.events(node), "round"))

    until(lambda: rounds(0) or rounds(1), "the first round", LIMIT_S)
    first = 0 if rounds(0) else 1
    with frozen(place.node(f"local-{first}")):
        until(lambda: rounds(1 - first), "a round of the other", LIMIT_S)
        other, victim = place.node("local-0"), place.node("local-1")
    (hub,) = place.processes("aedit.launch.hub.main")
    hub.kill()
    until(lambda: place.processes("aedit.launch.hub.main") not in ([], [hub]), "the hub to be back", LIMIT_S)
    before = rounds(1)
    until(lambda: rounds(1) > before, "node 1 to be answered again", LIMIT_S)
    assert len([event for event in place.events(1) if event["event"] == "start"]) == 1, (
        "not because of the hub"
    )
    with frozen(other):
        victim.kill()
        before = rounds(1)
        until(lambda: rounds(1) > before, "a round of node 1 after its new start", LIMIT_S)
    ends_well(run)
    starts = [event["attempt"] for event in place.events(1) if event["event"] == "start"]
    assert starts == [1, 2]
    assert place.events(0)[-1]["reason"] == place.events(1)[-1]["reason"] == "done"


@pytest.mark.slow
def test_nodes_join_with_an_address_and_keys_from_one_directory_and_all_leave_with_ctrl_c(place):
    """A second node of one directory is another node.

    A hub stopped by Ctrl-C waits for its nodes to leave.
    """
    address, keys = f"127.0.0.1:{free_port()}", place.directory / "keys"
    ends_well(place.aedit("keys", keys, "--host=127.0.0.1"))
    configure(place, 100_000, address=address)
    hub = place.aedit("hub", place.toml, f"--dir={place.directory}/hub", f"--keys={keys}/hub")
    shown = [hub.stdout.readline() for _ in range(3)]
    assert f"run x: hub at {address}" in shown[0]
    words = shown[1].partition("joins with  aedit ")[2].split()
    assert words == ["join", address, "--keys", f"{keys}/nodes"]
    assert shown[2].split()[-4:] == ["top", *words[1:]]
    here = place.directory / "joined" / "x"
    nodes = [place.aedit(*words, f"--dir={here.parent}", "--device=cpu") for _ in range(2)]

    def rounds(index):
        return steps_in(place.events(index, here), "round")

    until(lambda: rounds(0) and rounds(1), "a round of each", LIMIT_S)
    names = [(here / f"nodes/{index}/name").read_text() for index in (0, 1)]
    assert sorted(names) == sorted((here / "node_name").read_text().split())
    assert ends_well(place.aedit("status", *words[1:])).count("train") >= 2
    first = next(i for i in (0, 1) if psutil.pid_exists(nodes[0].pid) and started_by(nodes[0], here, i))
    nodes[0].send_signal(signal.SIGINT)
    nodes[0].communicate(timeout=LIMIT_S)
    assert nodes[0].returncode == 130
    hub.send_signal(signal.SIGINT)
    assert any("for nodes that leave too" in line for line in hub.stderr)  # else it may be gone before that
    nodes[1].send_signal(signal.SIGINT)
    began = time.monotonic()
    nodes[1].communicate(timeout=LIMIT_S)
    hub.communicate(timeout=LIMIT_S - (time.monotonic() - began))
    assert (hub.returncode, nodes[1].returncode) == (0, 130)
    for index in (first, 1 - first):
        stop = place.events(index, here)[-1]
        pushed = sum(p.steps for p in pushes_of(place.directory / "hub/x/hub") if p.node == index)
        assert stop["reason"] == "signal"
        assert pushed == 3 * stop["step"], "everything it had learned was pushed"


def started_by(process, run_dir, index):
    """Return whether the node of this index is a descendant of the command."""
    events = [json.loads(line) for line in (run_dir / f"nodes/{index}/events.jsonl").read_text().splitlines()]
    return any(
        child.pid == events[0]["pid"] for child in psutil.Process(process.pid).children(recursive=True)
    )


@pytest.mark.slow
def test_a_run_with_a_hub_starts_it_and_a_second_terminal_joins(place):
    configure(place, 100_000, expire_s=600.0)
    run = place.aedit("run", place.toml, f"--dir={place.directory}/runs")
    told = run.stderr.readline()
    address = told.split()[-1]
    assert f"hub at {address};" in told
    run_dir = place.directory / "runs" / "x"
    until(lambda: steps_in(place.events(0), "round"), "a round of the first", LIMIT_S)
    configuration = (run_dir / "run.toml").read_text()
    joined = place.aedit("join", address, f"--dir={place.directory}/runs", "--device=cpu")
    with frozen(place.node("local-0")):
        until(lambda: steps_in(place.events(1), "round"), "a round of the second", LIMIT_S)
    assert (run_dir / "run.toml").read_text() == configuration, "that of the run, not of the second node"
    for process in (run, joined):
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    for process in (run, joined):
        _, err = process.communicate(timeout=LIMIT_S - (time.monotonic() - began))
        assert process.returncode == 130, err
    assert place.processes("aedit.launch") == []


def test_who_cannot_join_is_told_why_in_one_line(place, capsys, monkeypatch):
    monkeypatch.setattr(client, "HELLO_LIMIT_S", 1.0)
    assert main(["join", f"127.0.0.1:{free_port()}", f"--dir={place.directory}/n"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("aedit: 127.0.0.1:")
    assert err.count("\n") == 1
    assert not (place.directory / "n").exists()
    assert main(["join", "198.51.100.1:7000", f"--dir={place.directory}/n"]) == 2
    err = capsys.readouterr().err
    assert "--keys" in err
    assert err.count("\n") == 1
