"""Tests that faults of processes and disks cost a run on rewards no group, and train none twice.

The ledger is the list of the positions of the run's stream of prompts that each node's kept inner steps have
trained (saboteur.py): node i of two trains i, i + 2, i + 4, ... without a gap.
"""

import contextlib
import signal
from collections import Counter

import psutil
import pytest
from faults.tiny_run import Run, deed, differing, until
from kit.rl_toml import rl_toml

from aedit.spec_rollout.remote.workers import MODULE as WORKER

STEPS, GROUPS, PROBLEMS = 10, 2, 16

PROMPTS = f"size = {PROBLEMS}\nheld_out = 0.2"

TABLES = """
[train]
steps = {steps}
batch_size = 6
lr = 3e-3
[edit]
every = 2
warmup_steps = 2
timeout_s = 60
[checkpoint]
every = 1
"""


class RLRun(Run):
    """A run of two nodes that trains on rewards."""

    def configure(self, steps, more="", data="", rl=""):
        tables = TABLES.format(steps=steps) + more
        text = rl_toml(self.toml.parent, groups=GROUPS, prompts=PROMPTS, rl=rl, tables=tables)
        for path in (self.toml, self.dir / "run.toml"):
            path.write_text(text)

    def trained(self, node):
        """Return position and problem of each group that the kept steps of a node have trained, in order."""
        drawn = self.draws(node)
        return [tuple(group) for step in sorted(drawn) for group in drawn[step]]


@pytest.fixture
def make_rl_run(node_server, tmp_path):
    made = []

    def make():
        made.append(RLRun(node_server, tmp_path, steps=STEPS))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.fixture(scope="module")
def undisturbed_rl(node_server, tmp_path_factory):
    run = RLRun(node_server, tmp_path_factory.mktemp("undisturbed-rl"), steps=STEPS)
    run.train()
    assert_every_group_once(run)
    return run


def assert_every_group_once(run):
    for node in range(2):
        positions = [position for position, _ in run.trained(node)]
        assert positions == [node + 2 * i for i in range(STEPS * GROUPS)]


def assert_same_end(run, undisturbed):
    for node in range(2):
        assert differing(run.newest(node), undisturbed.newest(node)) == []


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        pytest.param("drawing", 5, id="with rewarded groups"),
        pytest.param("drawn", 7, id="before the inner step", marks=pytest.mark.slow),
        pytest.param("stepped", 6, id="after the inner step", marks=pytest.mark.slow),
        pytest.param("renaming", 7, id="writing a checkpoint"),
    ],
)
def test_a_node_killed(make_rl_run, undisturbed_rl, moment, step):
    run = make_rl_run()
    nodes = run.start(deeds=[deed(1, moment, step, "SIGKILL")])
    assert nodes.wait(1) == -signal.SIGKILL
    assert nodes.wait(0) == 1
    assert "for the other nodes" in run.events("error")[-1]["message"]
    run.train()
    assert_every_group_once(run)
    assert_same_end(run, undisturbed_rl)


def test_a_node_killed_while_it_writes_its_first_checkpoint_trains_its_groups_once(make_rl_run):
    """It continues with the other node's checkpoint, whose round contains the groups that it had trained."""
    run = make_rl_run()
    nodes = run.start(deeds=[deed(1, "renaming", 3, "SIGKILL")])
    assert nodes.wait(1) == -signal.SIGKILL
    assert nodes.wait(0) == 1
    assert [len(run.checkpoints(node)) for node in range(2)] == [1, 0]
    run.train()
    assert_every_group_once(run)


def workers_of(nodes):
    """Return the rollout workers of these nodes, those that have ended not included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if WORKER in line and process.status() != psutil.STATUS_ZOMBIE:
                found += [process] * (int(line[line.index(WORKER) + 1]) in nodes.pids)
    return found


@pytest.mark.slow  # starts four workers with torch, twice
@pytest.mark.timeout(600)
@pytest.mark.parametrize("act", ["SIGTERM", "SIGKILL"])
def test_a_node_that_ends_leaves_no_worker_and_a_resume_trains_each_group_once(make_rl_run, monkeypatch, act):
    """The workers generate ahead while the nodes train."""
    monkeypatch.setattr("faults.tiny_run.LIMIT_S", 200.0)
    run = make_rl_run()
    run.configure(STEPS, rl="workers = 1\nmax_staleness = 1")
    nodes = run.start(deeds=[deed(1, "drawing", 5, act)])
    until(lambda: len(workers_of(nodes)) == 2, "a worker of each node")
    codes = [nodes.wait(node) for node in range(2)]
    assert codes == ([0, 0] if act == "SIGTERM" else [1, -signal.SIGKILL]), nodes.log()
    until(lambda: not workers_of(nodes), "the end of the workers")
    assert 0 < len(run.trained(1)) < STEPS * GROUPS
    run.train()
    assert_every_group_once(run)
    assert workers_of(run.started[-1]) == []


def test_a_node_that_is_asked_to_leave_puts_its_groups_back(make_rl_run, undisturbed_rl):
    run = make_rl_run()
    run.train(deeds=[deed(0, "drawn", 5, "SIGTERM"), deed(1, "drawing", 6, "SIGTERM")])
    run.train()
    assert_every_group_once(run)
    assert_same_end(run, undisturbed_rl)


def test_a_full_disk_costs_checkpoints_and_nothing_else(make_rl_run, undisturbed_rl):
    run = make_rl_run()
    run.train(deeds=[deed(1, "drawn", 4, "no room"), deed(1, "drawn", 9, "room")])
    assert len(run.events("checkpoint_failed", 1)) >= 2
    assert run.events("checkpoint_failed", 0) == []
    assert_every_group_once(run)
    assert_same_end(run, undisturbed_rl)


def test_prompts_that_run_out_begin_again_in_a_new_order(undisturbed_rl):
    """A source of n problems is passed through in epochs, each a permutation of all of them."""
    trained = sorted([*undisturbed_rl.trained(0), *undisturbed_rl.trained(1)])
    assert [position for position, _ in trained] == list(range(2 * STEPS * GROUPS))
    problems = [problem for _, problem in trained]
    size = len(set(problems))
    assert 2 * size < len(problems)
    epochs = [problems[start : start + size] for start in range(0, len(problems) - size, size)]
    assert all(Counter(epoch) == Counter(set(problems)) for epoch in epochs)
    assert epochs[0] != epochs[1]
