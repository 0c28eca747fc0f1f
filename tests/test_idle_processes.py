"""Tests that idle processes sleep. What counts is how often their threads have waited, whatever the load."""

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from kit.agents import MemoryHub, node, plan
from kit.hub_process import CONFIG, real_hub
from kit.served_runs import served_run
from kit.waiting import until

from aedit.proto.agent import Progress

OWN_PER_S, ALL_PER_S = 5.0, 60.0
"""Waits of all threads but gRPC's, and of all: gRPC's look for work up to 30 times a second after
each call, and then more and more rarely."""
GRPC = ("event_engine", "grpc", "lifeguard")
"""Beginnings of the names of its own threads."""
WINDOW_S = 4.0
LIMIT_S = 90.0


def waits(pid):
    """Return how often the threads of a process have given their core away to wait, by thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            lines = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line
            )
            found[f"{lines['Name']} {task.name}"] = int(lines["voluntary_ctxt_switches"])
    return found


def check_sleeps(pid):
    """Wait until the process has slept for a window; fail with the waits per second of each thread."""
    rates = {}

    def sleeps():
        nonlocal rates
        before, began_s = waits(pid), time.monotonic()
        time.sleep(WINDOW_S)
        passed_s = time.monotonic() - began_s
        rates = {name: (count - before.get(name, 0)) / passed_s for name, count in waits(pid).items()}
        own = sum(rate for name, rate in rates.items() if not name.startswith(GRPC))
        return own <= OWN_PER_S and sum(rates.values()) <= ALL_PER_S

    try:
        until(sleeps, "a process that sleeps", LIMIT_S)
    except AssertionError as error:
        awake = {name: round(rate, 2) for name, rate in rates.items() if rate}
        raise AssertionError(f"waits per second by thread: {awake}") from error


def test_a_hub_without_members_sleeps(tmp_path):
    slow = CONFIG.replace("heartbeat_s = 0.05", "heartbeat_s = 0.5").replace(
        "expire_s = 5.0", "expire_s = 15.0"
    )
    with real_hub(tmp_path, slow) as hub:
        check_sleeps(hub.process.pid)


def test_an_agent_sleeps_during_a_long_step_of_its_trainer():
    hub = MemoryHub()
    try:
        made = plan([hub.serve()], heartbeat_s=0.5, expire_s=15.0, call_timeout_s=30.0)
        with node(made, mode="process") as link:
            link.join(60)
            link.tell(Progress(steps=3, tokens=30, busy_s=3.0))
            (agent,) = [
                each for each in psutil.Process().children() if "agent_main" in " ".join(each.cmdline())
            ]
            check_sleeps(agent.pid)
            assert hub.heartbeats[-1].steps == 3, "it is a member, and reports"
            assert hub.heartbeats[-1].state == "training"
    finally:
        hub.kill()


@pytest.mark.slow
def test_a_rollout_server_without_requests_sleeps(tmp_path):
    with served_run(tmp_path) as (_, (server,)):
        server.wait(lambda: server.events("version"), "a policy version")
        check_sleeps(server.process.pid)
