"""Tests the accounts of samples where nodes and hubs are killed: real processes, counts of the test itself.

Each node writes what it draws to a file of the test's (saboteur.py); the journal of the hub says which of its
steps were accepted.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import PacedNode
from faults.tiny_run import LIMIT_S, deed, write_text
from kit.hub_process import HubProcess
from kit.waiting import until

from aedit.async_sgd.rules import Accepted, Joined, Left
from aedit.launch.cli import main
from aedit.launch.config import load
from aedit.launch.data import load_corpus, load_tokenizer
from aedit.launch.data.order import samples_at
from aedit.launch.hub import read_accounts, records_of
from aedit.launch.records import SampleVerdict

TOML = """
name = "test"
dir = "{directory}/.."
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2 }}
[data]
source = "{directory}/text.txt"
seq_len = 32
held_out = 0.3
[train]
steps = {steps}
batch_size = 2
eval_samples = 4
[edit]
every = 5
schedule = "steps"
landing = "arrival"
[outer]
kind = "average"
lr = 1.0
[hub]
address = "127.0.0.1:0"
quorum = 1
codec = "fp32"
weights = "uniform"
heartbeat_s = 0.1
expire_s = 3.0
lease_samples = 16
push_filter = {{ threshold = 1e9, cosine = false, clip = 1e9 }}
"""


def is_stopped(pid):
    """Return whether a process is stopped by a signal; one that is not yet would never go on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


class Nodes:
    """Nodes of a hub, each the only one of its own torchrun world."""

    def __init__(self, server, directory, address):
        self.server, self.directory, self.address, self.pids, self.starts = server, directory, address, {}, 0

    def start(self, name, deeds=()):
        self.starts += 1
        member = {"hub": self.address, "name": name}
        words = [str(self.directory / "run.toml"), json.dumps(
            {"ranks": 1, "attempt": self.starts, "local": False, "membership": member}
        )]  # fmt: skip
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "SABOTEUR_NAME": f"{name}.{self.starts}"}
        self.pids[name] = self.server.ask(env=env, deeds=list(deeds), words=words)

    def wait(self, name):
        code = self.server.ask(pid=self.pids[name], timeout_s=LIMIT_S)
        if code is None:  # the stacks of its threads say what it waits for
            os.kill(self.pids[name], signal.SIGUSR1)
            time.sleep(2)
        assert code is not None, (self.directory / "output.log").read_text()[-12000:]
        return code


def draws(directory, name):
    """Return the samples of each step of each start of a node, by the number of the start."""
    found = {}
    for path in sorted(directory.glob(f"draws_{name}.*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[int(path.stem.rpartition(".")[2])] = [indices for _, indices in lines]
    return [found[start] for start in sorted(found)]


def accepted_steps(directory):
    """Return for each node the steps in accepted pushes of unit 0, one number per process that has joined.

    The journal says which pushes were accepted, and the node how many steps each had: a hub counts fewer if
    more have been made than the time allows by the pace that it knows, as of a node that was stopped.
    """
    counted = counted_steps(directory / "hub")
    sizes = pushed_steps(directory)
    for name, attempts in counted.items():
        for steps, made in zip(attempts, sizes[name], strict=True):
            assert all(few <= all_of_it for few, all_of_it in zip(steps, made, strict=False)), (steps, made)
    return {
        name: [sum(made[: len(steps)]) for steps, made in zip(attempts, sizes[name], strict=True)]
        for name, attempts in counted.items()
    }


def pushed_steps(directory):
    """Return for each node the steps of each push, a list per process.

    A push that the hub did not get is part of the next one, which has its number.
    """
    found, at, number = defaultdict(list), 0, None
    for path in sorted(directory.glob("nodes/*/positions.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] == "start":
                name, at, number = line["name"], line["step"], None
                found[name].append([])
            elif line["event"] == "open":
                more, (this, *_) = line["step"] - at, line["numbers"]
                if this == number:
                    found[name][-1][-1] += more
                else:
                    found[name][-1].append(more)
                at, number = line["step"], this
    return found


def counted_steps(folder):
    """Return for each node the steps that each accepted push of unit 0 counts as, a list per process."""
    found, process = defaultdict(list), {}
    names = {}
    for record in records_of(folder):
        match record:
            case Joined(name=name, node=node, process=number):
                names[node] = name
                if process.get(node) != number:
                    process[node] = number
                    found[name].append([])
            case Accepted(push) if push.unit == 0 and push.base:
                found[names[push.node]][-1].append(push.steps)
    return found


@pytest.mark.timeout(300)
def test_a_killed_node_and_a_killed_hub_leave_accounts_that_are_those_of_the_test(
    node_server, tmp_path, capsys
):
    directory = tmp_path / "test"
    directory.mkdir()
    write_text(directory / "text.txt")
    text = TOML.format(directory=directory, steps=40)
    hub = HubProcess(directory, text)
    hub.start()
    nodes = Nodes(node_server, directory, hub.address)
    try:
        nodes.start("a", deeds=[deed(0, "drawing", 13, "SIGKILL")])
        nodes.start("b", deeds=[deed(0, "drawing", 9, "SIGSTOP")])  # or it would use up the budget alone
        assert nodes.wait("a") == -signal.SIGKILL
        hub.kill()
        hub.start()
        until(lambda: is_stopped(nodes.pids["b"]), "the stop of b", LIMIT_S)
        nodes.start("a")
        until(lambda: len(draws(directory, "a")) == 2, "steps of the second start", LIMIT_S)
        os.kill(nodes.pids["b"], signal.SIGCONT)
        assert nodes.wait("a") == nodes.wait("b") == 0
        until(lambda: hub.process.poll() is not None, "the end of the hub", LIMIT_S)
    finally:
        hub.process.kill()
        hub.process.wait(10)
    accounts = read_accounts(directory)
    assert accounts.disagreements == []
    config = load(directory / "run.toml", []).config
    samples = load_corpus(config.data, load_tokenizer(config.data), directory / "data").train
    sample_at = samples_at(range_of(len(accounts.verdict)), len(samples), config.seed)
    for name in "ab":
        attempts, accepted = draws(directory, name), accepted_steps(directory)[name]
        assert len(attempts) == len(accepted) == (2 if name == "a" else 1)
        counted = Counter(
            i for steps, n in zip(attempts, accepted, strict=True) for step in steps[:n] for i in step
        )
        (total,) = (each for each in accounts.nodes.values() if each.name == name)
        assert total.accepted == counted.total() > 0
        mine = [
            int(position)
            for piece in accounts.pieces
            if piece.attempt.name == name and piece.segment.mask
            for part in piece.trained.ranges
            for position in range(part.start, part.stop, part.step)
        ]
        assert Counter(int(sample_at[position]) for position in mine) == counted
    assert main(["ledger", str(directory)]) == int(accounts.count(SampleVerdict.TWICE) > 0)
    assert "agrees with the hub's journal" in capsys.readouterr().out
    _spoil(directory, capsys)


def range_of(size):
    import numpy as np

    return np.arange(size, dtype=np.int64)


def _spoil(directory, capsys):
    """Check that a lost record and a damaged hub folder are noticed."""
    other = directory.parent / "other"
    shutil.copytree(directory, other)
    path = next(other.glob("nodes/*/positions.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"trained"' in line)
    path.write_text("".join(lines[:at] + lines[at + 1 :]))
    capsys.readouterr()
    assert main(["ledger", str(other)]) == 1
    assert "DISAGREES" in capsys.readouterr().out
    path.write_text("".join(lines))
    (other / "hub" / "part.json").write_text("{}")
    assert main(["ledger", str(other)]) == 2
    error = capsys.readouterr().err
    assert "part.json: expected [PART, PARTS]" in error
    assert error.count("\n") == 1


@pytest.mark.timeout(300)
def test_a_node_that_is_killed_as_its_accepted_push_lands_has_no_sample_trained_twice(
    node_server, tmp_path, capsys
):
    """Twice, at the moment at which nothing but the push has told the hub what it has used."""
    directory = tmp_path / "test"
    directory.mkdir()
    write_text(directory / "text.txt")
    slow = ("heartbeat_s = 0.1\nexpire_s = 3.0", "heartbeat_s = 20.0\nexpire_s = 60.0")
    hub = HubProcess(directory, TOML.format(directory=directory, steps=40).replace(*slow))
    hub.start()
    nodes = Nodes(node_server, directory, hub.address)
    try:
        for step in (10, 5):
            nodes.start("a", deeds=[deed(0, "landing", step, "SIGKILL")])
            assert nodes.wait("a") == -signal.SIGKILL
        nodes.start("a")
        assert nodes.wait("a") == 0
        until(lambda: hub.process.poll() is not None, "the end of the hub", LIMIT_S)
    finally:
        hub.process.kill()
        hub.process.wait(10)
    attempts, accepted = draws(directory, "a"), accepted_steps(directory)["a"]
    assert len(attempts) == len(accepted) == 3
    # Rounds are 5 steps apart. At step 10 the second push has landed, or only the first one.
    assert accepted[0] in (5, 10)
    assert accepted[1] >= 5
    counted = Counter(
        i for steps, n in zip(attempts, accepted, strict=True) for step in steps[:n] for i in step
    )
    assert counted.total() == 2 * sum(accepted)
    assert set(counted.values()) == {1}
    accounts = read_accounts(directory)
    assert (accounts.disagreements, accounts.unreported) == ([], 0)
    assert accounts.count(SampleVerdict.ONCE) == counted.total()
    assert main(["ledger", str(directory)]) == 0
    assert "twice" not in capsys.readouterr().out


def test_a_node_that_is_stopped_until_it_is_given_up_has_no_sample_trained_twice_when_it_goes_on(tmp_path):
    """Found in a swarm: others had got the stock of the stopped machine, which trained it when it went on."""
    plan = PacedNode(hub="", name="", ledger="", expire_s=2.0, units=2)
    with Field(tmp_path, plan) as field:

        def trained(name, more):
            before = len(field.lines(name))

            def steps():
                lines = field.lines(name)[before:]
                return sum(
                    line["steps"] for line in lines if line["event"] == "answered" and line["unit"] == 0
                )

            until(lambda: steps() >= more, f"{more} steps of {name} in pushes", LIMIT_S)

        field.start_hub()
        for name in ("node-0", "node-1"):
            field.start_node(name)
            trained(name, 50)
        field.signal_node("node-0", signal.SIGSTOP)
        until(lambda: "gone: silent for 2 s" in states(field), "the end of the membership", LIMIT_S)
        trained("node-1", 400)  # more than its stock: it has leased again
        field.signal_node("node-0", signal.SIGCONT)
        trained("node-0", 400)
        assert field.end_nodes() == {"node-0": 0, "node-1": 0}
        field.end_hub()
    assert any(
        isinstance(record, Left) and record.reason == "silent for 2 s"
        for record in records_of(tmp_path / "hub")
    )
    accounts = read_accounts(tmp_path)
    assert (accounts.disagreements, accounts.unreported) == ([], 0)
    assert accounts.count(SampleVerdict.TWICE) == 0
    assert accounts.count(SampleVerdict.ONCE) >= 4 * 900


def states(field):
    status = field.status()
    return [node["state"] for node in status["nodes"]] if status else []
