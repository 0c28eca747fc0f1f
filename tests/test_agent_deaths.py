"""Tests the death of a trainer or its agent: the other one notices at once, and no process stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from kit.agents import MemoryHub, node, order, plan
from kit.waiting import until

from aedit.child import to_json
from aedit.launch.cli.keys import make_keys
from aedit.proto.agent import AgentLost, attach_agent
from aedit.types import UserError

TRAINER = """
    import os, sys, time
    import numpy as np
    from aedit.proto.agent.agent_link import start_agent
    from aedit.child import from_json
    from aedit.proto.agent import AgentPlan

    link = start_agent(from_json(AgentPlan, sys.argv[1]), ranks=1)
    for anchor in link.anchors:
        anchor[:] = 1
    link.join(20)
    if sys.argv[2] == "with child" and os.fork() == 0:
        time.sleep(60)  # a data loader's worker, say, which has the pipe to the agent too
        os._exit(0)
    link.outbox[1][:] = 1
    link.written(1, 1)
    link.send(1, 1, base=1, steps=1, tokens=1)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hub():
    made = MemoryHub()
    made.serve()
    yield made
    made.kill()


@contextlib.contextmanager
def trainer(hub, kind=""):
    """Yield a process with an agent; end all that is left of it afterwards."""
    words = [sys.executable, "-c", textwrap.dedent(TRAINER), to_json(plan([hub.server.address])), kind]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    family = []
    try:
        assert process.stdout.readline().strip() == str(process.pid)
        family = psutil.Process(process.pid).children(recursive=True)
        yield process, next(p for p in family if "aedit.proto.agent.agent_main" in p.cmdline())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        for left in family:
            with contextlib.suppress(psutil.Error):
                left.kill()


def agent_of(here):
    (found,) = [p for p in psutil.Process(here).children() if "aedit.proto.agent.agent_main" in p.cmdline()]
    return found


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kind", ["", "with child"])
def test_an_agent_ends_with_its_trainer(hub, kind):
    with trainer(hub, kind) as (process, agent):
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: is_gone(agent), "the agent's end")


def test_an_agent_that_is_stopped_ends_with_its_trainer_too(hub):
    with trainer(hub) as (process, agent):
        agent.suspend()
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: is_gone(agent), "the agent's end")


def test_signals_for_the_trainer_do_not_end_the_agent_it_leaves_through(hub):
    with node(plan([hub.server.address]), mode="process") as link:
        link.join(10)
        agent = agent_of(os.getpid())
        for sign in (signal.SIGINT, signal.SIGTERM):
            agent.send_signal(sign)
        link.leave(10)
    assert hub.left == {0}


def test_a_trainer_whose_agent_was_killed_hears_of_it_on_every_rank(hub):
    with node(plan([hub.server.address]), ranks=2, mode="process") as link:
        other = attach_agent(link.path, 1)
        link.join(10)
        order(link, 0, 1, 1.0, 1)
        agent_of(os.getpid()).kill()
        for end in (link, other):
            with pytest.raises(AgentLost, match="ended with -9"):
                until(lambda end=end: end.leases() and False, "the news")
            with pytest.raises(AgentLost):
                end.answer(0, 1)
        with pytest.raises(AgentLost):
            link.leave(5)


def test_an_agent_that_cannot_go_on_says_why(hub):
    with (
        node(plan([hub.server.address], keys="nowhere"), mode="process") as link,
        pytest.raises(Exception, match="nowhere"),
    ):
        link.join(10)


def test_what_only_the_person_can_mend_about_an_agent_is_not_a_death(hub, tmp_path):
    """An AgentLost would make torchrun start the node again, with the same result."""
    make_keys(tmp_path, ["127.0.0.1"])
    keys = str(tmp_path / "nodes")
    with (
        node(plan([hub.server.address], keys=keys, donor="127.0.0.1:0"), mode="process") as link,
        pytest.raises(UserError, match=r"server\.key"),
    ):
        link.join(10)


def test_the_memory_of_a_node_has_no_name_in_any_folder(hub):
    if sys.platform != "linux":
        pytest.skip("memory without a file is Linux's")
    with trainer(hub) as (process, agent):
        maps = Path(f"/proc/{agent.pid}/maps").read_text()
        assert "memfd:aedit-mailbox (deleted)" in maps
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: is_gone(agent), "the agent's end")


def test_an_agent_needs_no_torch_and_little_memory(hub):
    with trainer(hub) as (_, agent):
        assert "libtorch" not in Path(f"/proc/{agent.pid}/maps").read_text()
        assert agent.memory_info().rss < 100e6


def test_a_trainer_that_stands_still_is_said_to_be_stalled(hub, monkeypatch):
    from aedit.proto.agent import Progress, leases

    monkeypatch.setattr(leases, "LEAST_S", 0.3)
    with node(plan([hub.server.address])) as link:
        link.join(10)
        for steps in range(1, 4):
            link.tell(Progress(steps=steps))
            time.sleep(0.01)
        until(lambda: hub.heartbeats and hub.heartbeats[-1].state == "stalled", "the report")
        link.tell(Progress(steps=4))
        until(lambda: hub.heartbeats[-1].state == "training", "the report")
