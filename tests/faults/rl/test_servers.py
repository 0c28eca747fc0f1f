"""Tests that a run with rollout servers survives the death of any process without a lost or other sample.

The oracle is one node alone, whose own engine draws the same groups. The learning rate is so small that no
weight changes: the tokens of a group depend on its key alone, whatever version drew it, although versions
change all the time.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import psutil
import pytest
from faults.rl.test_killed_hub import processes
from faults.tiny_run import SABOTEUR
from kit.hub_journal import check_leases
from kit.rl_nodes import run
from kit.rl_toml import rl_toml
from kit.waiting import until

from aedit.async_sgd.rules import Used
from aedit.launch.config import load
from aedit.launch.hub import records_of, replayed
from aedit.launch.node.rl_groups import GroupStream

LIMIT_S = 240.0
LEASE, EVERY, GROUPS = 16, 4, 2
SOME = 3 * EVERY * GROUPS
"""Groups that are trained between two faults."""

TRAIN = """
[train]
steps = {steps}
batch_size = 6
lr = 1e-30
"""
HUB = f"""
[edit]
every = {EVERY}
schedule = "dylu"
landing = "arrival"
[hub]
address = "127.0.0.1:0"
quorum = 1
heartbeat_s = 0.1
expire_s = 3.0
lease_samples = {LEASE}
"""
DTYPE = 'engine_dtype = "fp64"\n'
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def toml(directory, tables, rl=""):
    return rl_toml(directory, groups=GROUPS, prompts="size = 100", tables=tables, rl=DTYPE + rl)


class ServedRun:
    """`aedit run` with a hub and two trainers, and rollout servers by name."""

    def __init__(self, directory):
        self.directory, self.run_dir = directory, directory / "x"
        self.toml = directory / "run.toml"
        self.toml.write_text(toml(directory, TRAIN.format(steps=1_000_000) + HUB, 'servers = "hub"'))
        self.log = (directory / "log").open("a")
        self.wrapper = self._start(str(SABOTEUR), "--aedit", "run", str(self.toml), "--local=2")
        self.servers = {}

    def _start(self, *words):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        return subprocess.Popen([sys.executable, *words], env=os.environ | ENV, **pipes)

    def serve(self, name):
        address = (self.run_dir / "hub" / "address").read_text().strip()
        words = ("serve", address, "--as", name, f"--dir={self.directory}/{name}")
        self.servers[name] = self._start("-m", "aedit.launch.cli", *words)

    def kill(self, name):
        self.servers[name].kill()
        self.servers.pop(name).wait(60)

    def hub(self):
        return [each.pid for each in processes(self.directory, "aedit.launch.hub.main")]

    def groups(self):
        """Return position, problem, rewards and texts of each group that a node has trained."""
        lines = []
        for path in self.run_dir.glob("groups_*.jsonl"):
            lines += [
                json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
            ]
        return lines

    def events(self, kind, **fields):
        """Return the events of both nodes of a kind that have these fields."""
        found = []
        for path in self.run_dir.glob("nodes/*/events.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [e for e in found if e["event"] == kind and fields.items() <= e.items()]

    def go_on(self, what):
        """Wait until further groups have been trained."""
        before = len(self.groups())
        self.wait(lambda: len(self.groups()) >= before + SOME, f"{SOME} groups {what}")

    def wait(self, condition, what):
        def is_so():
            assert self.wrapper.poll() is None, self.output()
            return condition()

        try:
            until(is_so, what, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def output(self):
        return (self.directory / "log").read_text()[-4000:]

    def end(self):
        self.wrapper.send_signal(signal.SIGINT)
        assert self.wrapper.wait(LIMIT_S) == 130, self.output()


@contextmanager
def served(directory):
    made = ServedRun(directory)
    try:
        yield made
    finally:
        for process in (made.wrapper, *made.servers.values()):
            process.kill()
            process.wait(60)
        for process in processes(directory):
            process.kill()
        made.log.close()


def drawn_alone(directory, num_groups, monkeypatch):
    """Return the groups of one undisturbed node, by position."""
    found, trained = {}, GroupStream.trained

    def kept(stream, count):
        groups = trained(stream, count)
        for group in groups:
            texts = [[rollout.tokens, rollout.finish_reason] for rollout in group.rollouts]
            found[group.position] = [group.position, group.problem.index, list(group.rewards), texts]
        return groups

    monkeypatch.setattr(GroupStream, "trained", kept)
    directory.mkdir()
    file = directory / "run.toml"
    file.write_text(toml(directory, TRAIN.format(steps=-(-num_groups // GROUPS))))
    run(load([file], []).config)
    return found


@pytest.mark.slow  # a hub, two trainers with a worker each, two servers, on and off
@pytest.mark.timeout(1500)
def test_the_death_of_any_process_costs_no_sample_and_changes_none(tmp_path, monkeypatch):
    with served(tmp_path) as made:
        made.wait((tmp_path / "x" / "hub" / "address").exists, "the hub")
        for name in ("a", "b"):
            made.serve(name)
        joined = lambda name: len(made.events("server_joined", server=name))  # noqa: E731
        made.wait(lambda: joined("a") >= 2 and joined("b") >= 2, "both servers at both trainers")
        made.go_on("with both servers")
        made.kill("a")
        made.go_on("without a server that was killed")
        before = joined("a")
        made.serve("a")
        made.wait(lambda: joined("a") >= before + 2, "the killed server at both trainers")

        before = joined("b")
        os.kill(made.servers["b"].pid, signal.SIGSTOP)
        made.wait(lambda: len(made.events("server_lost", server="b")) >= 2, "the loss of the stopped server")
        made.go_on("without the stopped server")
        os.kill(made.servers["b"].pid, signal.SIGCONT)
        made.wait(lambda: joined("b") >= before + 2, "the stopped server at both trainers")

        (hub,) = made.hub()
        os.kill(hub, signal.SIGKILL)
        made.wait(lambda: made.hub() not in ([], [hub]), "another hub")
        made.go_on("after the death of the hub")

        trainer = made.events("start", node=1)[-1]["pid"]
        os.kill(trainer, signal.SIGKILL)
        made.wait(lambda: made.events("start")[-1]["pid"] and len(made.events("start")) >= 3, "the trainer")
        made.go_on("after the death of a trainer")

        for name in ("a", "b"):
            made.kill(name)
        made.go_on("without any server")
        made.end()

        folder, groups = tmp_path / "x" / "hub", made.groups()
        records = list(records_of(folder))
        used = {p for each in records if isinstance(each, Used) for p in range(each.start, each.upto)}
        check_leases(records, replayed(folder).state.pool, used)
        alone = drawn_alone(tmp_path / "alone", max(used) + 1, monkeypatch)
    counts = Counter(position for position, *_ in groups)
    assert used <= counts.keys(), "trained by nobody"
    # The killed trainer had trained groups that it had not pushed: another step has trained them.
    again = {position for position, count in counts.items() if count > 1}
    assert len(again) <= 2 * EVERY * GROUPS
    assert [group for group in groups if group[0] in alone and group != alone[group[0]]] == []
    assert used <= alone.keys()
    assert {e["server"] for e in made.events("server_joined")} == {"a", "b"}
    assert not psutil.pid_exists(trainer)
