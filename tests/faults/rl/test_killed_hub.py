"""Tests that a hub and a node that are killed cost a run on rewards no group, and train none twice."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from faults.tiny_run import SABOTEUR
from kit.hub_journal import check_leases
from kit.rl_toml import rl_toml
from kit.waiting import until

from aedit.launch.hub import records_of, replayed

LIMIT_S = 150.0
LEASE = 16
STEPS = 120

TABLES = """
[train]
steps = {steps}
batch_size = 6
[edit]
every = 4
schedule = "dylu"
landing = "arrival"
[hub]
address = "127.0.0.1:0"
quorum = 1
heartbeat_s = 0.1
expire_s = 3.0
lease_samples = {lease}
"""


def processes(directory, *marks):
    """Return the processes that have the run's directory and all of `marks` in their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid != os.getpid() and all(mark in line for mark in (str(directory), *marks)):
            found.append(process)
    return found


def trained(directory):
    """Return the positions of the stream that the steps of both nodes have trained."""
    path = directory / "x" / "draws_0_0.jsonl"  # each node is the first of its own torchrun world
    lines = path.read_text().splitlines() if path.exists() else []
    return [position for line in lines for position, _ in json.loads(line)[1]]


@pytest.mark.slow  # starts a hub twice and two nodes with torchrun
@pytest.mark.timeout(3 * LIMIT_S)  # each of its three waits has a deadline
def test_a_killed_hub_costs_no_group_and_trains_none_twice(tmp_path):
    toml = tmp_path / "run.toml"
    tables = TABLES.format(steps=STEPS, lease=LEASE)
    toml.write_text(rl_toml(tmp_path, groups=2, prompts="size = 100", tables=tables))
    words = [sys.executable, str(SABOTEUR), "--aedit", "run", str(toml), "--local=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(words, text=True, env=env, **pipes)
    try:
        until(lambda: len(trained(tmp_path)) > 3 * LEASE, "leases of both nodes", LIMIT_S)
        (hub,) = processes(tmp_path, "aedit.launch.hub.main")
        hub.kill()
        until(
            lambda: processes(tmp_path, "aedit.launch.hub.main") not in ([], [hub]),
            "the hub to be back",
            LIMIT_S,
        )
        _, err = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, err[-3000:]
    finally:
        run.kill()
        run.communicate()
        for process in processes(tmp_path):
            process.kill()
    positions, folder = trained(tmp_path), tmp_path / "x" / "hub"
    assert len(positions) >= 2 * 2 * STEPS
    # Each node had leased prompts ahead: what it has not used goes to others.
    pool = replayed(folder).state.pool
    check_leases(records_of(folder), pool, positions)
    assert pool.leases.keys() <= {0, 1}
    assert not any(pool.leases.values())
