"""Tests agents with a real hub that is killed at any time: every push is in the anchors exactly once."""

import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from kit.agents import node, order, plan
from kit.hub_journal import check_journal
from kit.hub_processes import HubProcess, ending, status
from kit.waiting import until
from kit.wire import cutting

from aedit.launch.hub import anchors_of
from aedit.proto.agent import Progress
from aedit.types import Verdict

RUN = """
name = "test"
dir = "{dir}"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
penalty = {{ clip = "none" }}
[outer]
kind = "average"
lr = 1.0
[hub]
address = "127.0.0.1:0"
standby = "{standby}"
weights = "uniform"
codec = "fp32"
heartbeat_s = 0.1
expire_s = 3.0
[hub.staleness]
rule = "constant"
[hub.push_filter]
threshold = 1e9
cosine = false
"""
ROUNDS, KILLS = 12, 3


def start_hub(directory, standby=""):
    (directory / "run.toml").write_text(RUN.format(dir=directory, standby=standby))
    return HubProcess(directory / "run.toml", directory / "hub")


def member(address, name, **changes):
    settings = {"heartbeat_s": 0.1, "expire_s": 3.0, "samples_per_step": 2}
    return plan([address], name=name, **(settings | changes))


def train(link, seed, merged, reached):
    """Push whole numbers, whose sums fp32 holds exactly; a refused push is added to the next one."""
    rng = np.random.default_rng(seed)
    versions = list(link.join(30))
    kept = [np.zeros_like(v) for v in link.outbox]
    for seq in range(1, ROUNDS + 1):
        until(lambda n=2 * seq: sum(e - s for s, e in link.leases(n)) >= n, "samples of a step", limit_s=60)
        for unit in (0, 1):
            kept[unit] += rng.integers(-8, 9, kept[unit].size)
            order(link, unit, seq, kept[unit], versions[unit])
        for unit in (0, 1):
            answer = until(lambda u=unit, s=seq: link.answer(u, s), "an answer", limit_s=60)
            assert answer.version >= versions[unit]
            versions[unit] = answer.version
            if answer.verdict == Verdict.MERGED:
                merged[unit] += kept[unit]
                kept[unit][:] = 0
        link.tell(Progress(steps=seq, drawn=2 * seq))
        reached[seed] = seq
    until(lambda: min(reached) == ROUNDS, "the other node, which breaks ties too", limit_s=90)
    link.leave(30)


def check(directory, address, merged):
    """Check that everything that was merged is in the journal once, and that a new node gets its anchors."""
    for unit, pushed in check_journal(directory).items():
        assert np.array_equal(pushed, merged[0][unit] + merged[1][unit])
    with node(member(address, "c"), start=[0, 0]) as third:
        third.join(30)
        for unit, anchor in anchors_of(directory).items():
            assert np.array_equal(third.anchors[unit], anchor)
    assert merged[0][0].any()
    assert merged[1][1].any()


@contextmanager
def training(links, first):
    """Run two nodes; yield what was merged of theirs and their rounds so far, then wait for them."""
    merged, reached = [[np.zeros_like(v) for v in first] for _ in links], [0, 0]
    threads = [
        threading.Thread(target=train, args=(link, i, merged[i], reached)) for i, link in enumerate(links)
    ]
    for thread in threads:
        thread.start()
    yield merged, reached
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)


def after(reached, rounds):
    until(lambda: reached[0] > rounds, "the rounds before the kill", limit_s=60)


def is_settled(state):
    """Return whether the standby is in sync, and the live nodes break ties."""
    live = [member for member in state["nodes"] if not member["state"].startswith("gone")]
    return state["standby"] and state["electors"] == len(live)


def test_a_hub_that_is_killed_again_and_again_has_every_push_once(tmp_path):
    first = [np.zeros(22, np.float32), np.ones(5000, np.float32)]
    with ending(), ExitStack() as held:
        hub = start_hub(tmp_path)
        address = hub.address
        one = held.enter_context(node(member(address, "a"), mode="process", start=first))
        two = held.enter_context(node(member(address, "b"), start=first))
        with training((one, two), first) as (merged, reached):
            for kill in range(KILLS):
                after(reached, 3 * kill)
                hub.kill()
                hub = start_hub(tmp_path)
                assert hub.address == address
        check(tmp_path / "hub", address, merged)


def test_an_agent_pushes_and_pulls_two_megabytes_over_a_link_that_is_cut_every_250_kb(tmp_path):
    """An oracle: one node alone, with lr 1 and the mean of its pushes, moves the anchor by its push."""
    shapes = (((500, 1000),), ((7,),))
    first = [np.arange(500_000, dtype=np.float32) % 1000, np.ones(7, np.float32)]
    pushed = np.random.default_rng(0).integers(-8, 9, 500_000).astype(np.float32)
    with ending():
        hub = start_hub(tmp_path)
        with (
            cutting(hub.address) as (address, connections),
            node(member(address, "a", shapes=shapes), start=first) as link,
        ):
            versions = link.join(60)
            order(link, 0, 1, pushed, versions[0])
            answer = until(lambda: link.answer(0, 1), "an answer", limit_s=60)
            assert answer.verdict == Verdict.MERGED
            assert np.array_equal(link.anchors[0], first[0] - pushed)
        assert len(connections) >= 24, "three times two megabytes"
        assert np.array_equal(anchors_of(tmp_path / "hub")[0], first[0] - pushed)


def test_nodes_whose_hub_is_gone_for_good_go_on_at_its_standby(tmp_path):
    first = [np.zeros(22, np.float32), np.ones(5000, np.float32)]
    with ending(), ExitStack() as held:
        hub = start_hub(tmp_path, standby="127.0.0.1:0")
        standby = HubProcess(tmp_path / "run.toml", tmp_path / "standby", "--standby")
        plans = [member(hub.address, name, standbys=(standby.address,)) for name in "ab"]
        one = held.enter_context(node(plans[0], mode="process", start=first))
        two = held.enter_context(node(plans[1], start=first))
        with training((one, two), first) as (merged, reached):
            after(reached, 3)
            until(lambda: is_settled(status(hub.address)), "the nodes that are there to be the electors")
            hub.kill()
        check(tmp_path / "standby", standby.address, merged)


@pytest.mark.slow
def test_nodes_let_their_hub_go_on_without_its_standby(tmp_path):
    first = [np.zeros(22, np.float32), np.ones(5000, np.float32)]
    with ending(), ExitStack() as held:
        hub = start_hub(tmp_path, standby="127.0.0.1:0")
        standby = HubProcess(tmp_path / "run.toml", tmp_path / "standby", "--standby")
        plans = [member(hub.address, name, standbys=(standby.address,)) for name in "ab"]
        one = held.enter_context(node(plans[0], mode="process", start=first))
        two = held.enter_context(node(plans[1], start=first))
        with training((one, two), first) as (merged, reached):
            until(lambda: is_settled(status(hub.address)), "the standby and the nodes")
            after(reached, 1)
            standby.kill()
        assert hub.events("standby_lost")
        check(tmp_path / "hub", hub.address, merged)
