"""Tests that the interval of reports follows the number of members, and that none is lost that obeys."""

import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch
from benchmarks.programs.light_members import Crowd, Light
from kit.agents import exchange, node, plan
from kit.hub_machine import World, config
from kit.hub_machine import plan as hub_plan
from kit.leading_hub import leading_hub
from kit.waiting import until
from test_membership import Owner, Scene

from aedit.async_sgd.hub import Clocks, member_timeouts
from aedit.async_sgd.hub.member_timeouts import allowed_silence, heartbeat_interval
from aedit.async_sgd.rules import Configured, HubConfig, Left
from aedit.edit import EditConfig
from aedit.edit.hub_join import HubNodeOptions, HubSettings, node_plan
from aedit.proto.agent import Progress, membership
from aedit.proto.agent.agent import Agent
from aedit.proto.rpc import USUAL_CALL_S, CallCost, HubRefused, frames
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.limits import ByteBudget
from aedit.proto.rpc.transfer import PartialPushes

LIMIT_S = 120.0

# --- what a hub asks for


def test_the_interval_is_a_quarter_of_a_core_for_all_members_by_hand():
    usual = hub_plan(config())
    asked = {
        (members, call_s): heartbeat_interval(usual, members, call_s)
        for members, call_s in (
            (1, 1e-3),
            (125, 1e-3),
            (250, 1e-3),
            (10_000, 1e-3),
            (10_000, 5e-4),
            (10**6, 1e-3),
        )
    }
    assert list(asked.values()) == pytest.approx([0.5, 0.5, 1.0, 40.0, 20.0, 600.0])
    paced = replace(usual, pace="seconds", every=30.0)
    assert heartbeat_interval(paced, 10_000, 1e-3) == 7.5  # nodes learn of a round by the reply
    assert heartbeat_interval(replace(paced, every=1.0), 10_000, 1e-3) == 0.5


def test_a_member_may_be_silent_for_three_intervals_but_not_less_than_configured():
    settings = config(heartbeat_s=1.0, expire_s=2.5)
    assert [allowed_silence(settings, s) for s in (1.0, 1.1, 40.0)] == [2.5, pytest.approx(3.3), 120.0]


def test_members_that_break_ties_report_as_often_as_configured():
    world = crowd(20, call_s=0.5)
    world.hub.state.members[3].voter = 77
    world.do([Configured(1, 1, 5, (5,), (77,))])
    assert [world.hub.ask(n)[0] for n in (3, 4)] == [0.5, 40.0]


def crowd(members, call_s):
    """Return a hub with members that have just joined."""
    world = World(hub_plan(config()))
    world.hub.clocks.call_s = call_s
    for i in range(members):
        world.join(f"n{i}")
    return world


class Obedient:
    """A member that reports when the last reply that has reached it says."""

    def __init__(self, world, rng, name):
        self.rng, self.node = rng, world.join(name)
        self.take(world)

    def take(self, world):
        every_s, _ = world.hub.ask(self.node)
        if self.rng.random() < 0.8 or not hasattr(self, "every_s"):  # else the reply is lost
            self.every_s = every_s
        self.due_s = world.now + self.every_s * self.rng.uniform(0.9, 1.1) + self.rng.uniform(0.0, 2.0)

    def report(self, world):
        world.heartbeat(self.node)
        self.take(world)


@pytest.mark.parametrize("seed", range(12))
def test_no_member_that_obeys_is_given_up_and_each_silent_one_is(seed):
    """Members come and go, the cost of a heartbeat changes, replies are lost, and the hub is restarted."""
    rng = random.Random(seed)
    world = World(hub_plan(config()))
    obedient, silent, most = {}, {}, 0
    world.hub.clocks.call_s = least_s = 0.2
    for turn in range(400):
        act = rng.random()
        if act < 0.3 and len(obedient) < 30:
            one = Obedient(world, rng, f"n{turn}")
            obedient[one.node] = one
        elif act < 0.35 and len(obedient) > 3:
            gone = obedient.pop(rng.choice(list(obedient)))
            silent[gone.node] = world.now
        elif act < 0.5:
            world.hub.clocks.call_s = rng.uniform(least_s, 2.5 * least_s)
        elif act < 0.52:  # the volatile state is that of a new process
            world.hub.clocks = Clocks()
            world.hub.clocks.call_s = least_s
            silent = dict.fromkeys(silent, world.now)
        end_s = world.now + rng.expovariate(1 / 3.0)
        while obedient and (first := min(obedient.values(), key=lambda one: one.due_s)).due_s < end_s:
            world.now = max(world.now, first.due_s)
            most = max(most, len(world.hub.state.live))
            given_up = [record.node for record in world.tick() if isinstance(record, Left)]
            assert not obedient.keys() & given_up
            silent = {n: since_s for n, since_s in silent.items() if n not in given_up}
            first.report(world)
        world.now = max(world.now, end_s)
    longest_s = 3.0 * most * 2.5 * least_s / 0.25
    assert all(world.now - since_s <= longest_s + 15.0 for since_s in silent.values())


def test_a_member_that_has_not_got_the_last_reply_may_obey_the_one_before():
    world = crowd(40, call_s=0.5)
    assert world.hub.ask(0) == (80.0, 240.0)
    for other in range(1, 40):
        world.do(world.hub.leave(other))
    world.heartbeat(0)
    assert world.hub.ask(0) == (2.0, 15.0)  # and this reply is lost
    world.tick(88.0)
    world.heartbeat(0)
    assert world.hub.ask(0) == (2.0, 15.0)
    assert world.hub.state.live
    world.tick(15.5)
    assert not world.hub.state.live


def test_a_push_and_a_pull_are_signs_of_life():
    world = crowd(2, call_s=1e-3)
    world.found()
    for _ in range(6):
        world.tick(10.0)
        world.push(0, 0.1)
        world.settle()
        world.hub.called(1, world.now)  # as for a pull
    assert not any(isinstance(record, Left) for record in world.journal)
    world.tick(16.0)
    assert sum(isinstance(record, Left) for record in world.journal) == 2


# --- what a heartbeat costs


def test_the_cost_of_a_call_is_that_of_the_loop_by_message_and_of_the_handlers_by_call():
    cost = CallCost()
    loop_s = 0.0
    for _ in range(60):
        for _ in range(100):
            cost.message()
        loop_s += 0.06
        cost.measure(loop_s)
    assert cost.call_s == pytest.approx(1.3 * 0.06 / 100, rel=0.01)
    burnt = cost.call_s

    def burn():
        end_s = time.thread_time() + 0.002
        while time.thread_time() < end_s:
            pass
        return "done"

    assert cost.work(burn) == "done"
    for _ in range(100):
        cost.message()
    cost.measure(loop_s + 0.06)
    assert cost.call_s > burnt + 0.05 * 0.002


def test_an_idle_hub_and_an_absurd_measurement_change_little():
    cost = CallCost()
    for second in range(1000):  # pings and timers take time, and there are few calls
        if second % 100 == 0:
            cost.message()
        cost.measure(0.1 * second)
    assert cost.call_s == USUAL_CALL_S
    for second in range(1000, 1200):
        for _ in range(50):
            cost.message()
        cost.measure(100.0 * second)
    assert cost.call_s == pytest.approx(2.5 * USUAL_CALL_S, rel=1e-3)
    assert member_timeouts.MISSED > 1.1 * 2.5, "what another hub has asked for is within what this one allows"


# --- what a node does


class Fast(Owner):
    steps_per_s = 0.0


def asked(scene, **values):
    """Return the interval of a node after a reply with these values."""
    scene.hubs["a:1"].heartbeat = lambda request, timeout_s: pb.News(term=1, **values)
    scene.turn()
    return scene.node.interval_s()


def test_a_node_reports_when_the_hub_asks_and_an_older_hub_asks_for_nothing(tmp_path):
    scene = Scene(tmp_path, heartbeat_s=0.5, expire_s=15.0)
    assert asked(scene) == 0.5
    assert asked(scene, heartbeat_s=40.0, expire_s=120.0) == 40.0
    assert scene.node.expire_s == 120.0
    for absurd in (float("nan"), float("inf"), -1.0, 1e9, 0.01):
        assert asked(scene, heartbeat_s=absurd, expire_s=absurd) == 0.5
        assert scene.node.expire_s == 15.0


def test_a_node_whose_hub_is_away_or_that_awaits_a_decision_asks_again_soon_and_then_more_rarely(tmp_path):
    scene = Scene(tmp_path, swarm=False, heartbeat_s=0.5)
    assert asked(scene, heartbeat_s=4.0) == 4.0
    scene.node.awaits = lambda: True
    assert [scene.node.interval_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    scene.node.awaits = lambda: False
    assert scene.node.interval_s() == 4.0
    scene.node.missed()
    assert scene.node._hurry.is_set(), "it looks at once whether the hub is away"
    assert [scene.node.interval_s() for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]


def test_a_fast_node_reports_before_it_has_trained_its_lead(tmp_path):
    scene = Scene(tmp_path, heartbeat_s=0.5, steps_ahead=1024)
    assert asked(scene, heartbeat_s=40.0) == 40.0
    scene.node._owner = Fast()
    scene.node._owner.steps_per_s = 64.0
    assert scene.node.interval_s() == 4.0
    scene.node._owner.steps_per_s = 1e6
    assert scene.node.interval_s() == 0.5


def test_the_time_between_heartbeats_is_no_silence_of_the_hub(tmp_path, monkeypatch):
    scene = Scene(tmp_path, swarm=False, heartbeat_s=0.5, expire_s=15.0)
    asked(scene, heartbeat_s=40.0, expire_s=120.0)

    def away(request, timeout_s):
        raise HubRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    scene.hubs["a:1"].heartbeat = away
    for silent_s, wanted in ((41.0, False), (56.0, True)):
        scene.asked.clear()
        monkeypatch.setattr(scene.node, "_heard_s", time.monotonic() - silent_s)
        scene.turn()
        assert any(address != "a:1" for address, _ in scene.asked) is wanted


# --- real hubs over gRPC

RUN = """
name = "run"
dir = "{dir}"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
[hub]
address = "127.0.0.1:0"
codec = "fp32"
heartbeat_s = 0.5
expire_s = {expire_s}
snapshot_bytes = {snapshot_bytes}
{more}
"""


def test_a_push_carries_the_report_in_place_of_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(member_timeouts, "HEARTBEAT_SHARE", USUAL_CALL_S / 500.0)
    monkeypatch.setattr(membership, "_EARLY", 0.0)
    stocks = []
    monkeypatch.setattr(Agent, "_lease", lambda self: stocks.append(self._stock.lasts_s))
    with leading_hub(tmp_path, template=RUN) as hub:
        driver, pushed, reported = hub.leading.driver, [], []
        push, heartbeat = driver.exchange.push, driver.heartbeat

        def pushes(head, data):
            pushed.append(head.HasField("report"))
            return push(head, data)

        def reports(request):
            reported.append(request)
            return heartbeat(request)

        driver.exchange.push, driver.heartbeat = pushes, reports
        with node(plan([hub.address], run="run", heartbeat_s=0.5, expire_s=15.0, steps_ahead=1024)) as link:
            base = link.join(LIMIT_S)[0]
            until(lambda: reported and reported[-1].state == "training", "the state of the node", LIMIT_S)
            for seq in range(1, 9):
                link.tell(Progress(steps=seq, busy_s=float(seq)))
                base = exchange(link, 0, seq, np.float32(0.001), base).version
            state = hub.leading.ledger.hub
            index = state.state.names["a"]
            assert state.clocks.reports[index].steps == 8, "nothing but a push has reported the last step"
            assert sum(pushed) >= 8
            alone = len(reported) - sum(pushed)
            # Of each push two at most: one at once, and one until the decision is there; a few at the start.
            assert alone <= 2 * 8 + 6
            assert state.ask(index) == pytest.approx((500.0, 1500.0))
            assert stocks[-1] == pytest.approx(4 * 1500.0)


def test_a_push_goes_on_where_it_broke_off_whatever_its_report_says():
    pushes = PartialPushes(ByteBudget(2**20))
    used = [pb.Consumed(start=4, upto=9)]
    head = pb.PushHead(unit=1, seq=2, num_bytes=100, report=pb.HeartbeatRequest(steps=1), consumed=used)
    arrival = pushes.begin(head, 0, 100)
    (first, *_) = frames.chunks(b"head", memoryview(bytes(100)), chunk_bytes=60)
    arrival.add(first)
    assert pushes.end(arrival, keeps=True)
    head.report.steps = 2
    head.consumed[0].upto = 12
    assert pushes.find(head).num_bytes == 60


def test_a_report_of_a_push_that_is_refused_costs_nothing_but_the_report(tmp_path):
    with leading_hub(tmp_path, template=RUN) as hub:
        client = hub.node().found()
        blocks = [pb.Consumed(start=i, upto=i + 1) for i in range(2000)]
        client.seqs[0] += 1
        data = np.full(client.numels[0], 1e-3, np.float32).tobytes()
        head = pb.PushHead(who=client.who, unit=0, seq=client.seqs[0], base=1, steps=1, codec="fp32")
        head.num_bytes = len(data)
        head.report.consumed.extend(blocks)
        reply = client.hub.push(head, memoryview(data))
        assert reply.accepted
        assert not reply.HasField("run")
        head.report.ClearField("consumed")
        reply = client.hub.push(head, memoryview(data))  # the same again is answered again
        assert (reply.accepted, reply.run.nodes, reply.run.heartbeat_s) == (True, 1, 0.5)
        head.report.state = "x" * 2**17
        with pytest.raises(HubRefused, match="a head of"):
            client.hub.push(head, memoryview(data))
        client.hub.close()


def test_members_over_grpc_report_at_the_interval_that_grows_with_their_number(tmp_path, monkeypatch):
    """60 members for 3 s, of whom each is silent for longer than `expire_s` between two reports."""
    members, interval_s = 60, 3.0
    monkeypatch.setattr(member_timeouts, "HEARTBEAT_SHARE", members * USUAL_CALL_S / interval_s)
    with leading_hub(tmp_path, expire_s=1.5, template=RUN) as hub:
        hub.process._cost.measure = lambda loop_s: None  # the interval shall not depend on this machine
        crowd = Crowd(Light(hub=hub.address, run="run", count=members, seconds=0.0, units=1, numel=8))
        began_s = time.monotonic()
        crowd.join()
        crowd.counts = True
        deadline_s = time.monotonic() + LIMIT_S
        while len(crowd.beats.beat_s) < 3 * members:
            crowd.turn()
            assert time.monotonic() < deadline_s
        took_s = time.monotonic() - began_s
        ledger = hub.leading.ledger
        with ledger.lock:
            assert len(ledger.hub.state.live) == members
            limit_s = ledger.hub._member_timeouts().limit_s
            assert [limit_s(node) for node in ledger.hub.state.live] == pytest.approx([9.0] * members)
        assert crowd.beats.refused == 0
        assert crowd.beats.asked_s == pytest.approx(interval_s)
        # With 0.5 s, as configured, it would be six times as many. Those that joined first are asked sooner.
        assert len(crowd.beats.beat_s) <= members * (took_s / (0.9 * interval_s) + 3)
        crowd.close()
        until(lambda: not ledger.hub.state.live, "the end of the silent members", LIMIT_S)
        assert all(m.gone == "silent for 9 s" for m in ledger.hub.state.members)


def test_measuring_runs_in_the_loop_of_a_real_hub(tmp_path):
    with leading_hub(tmp_path, template=RUN) as hub:
        cost = hub.process._cost
        crowd = Crowd(Light(hub=hub.address, run="run", count=10, seconds=0.0, units=1, numel=8))
        crowd.join()
        looks = threading.Event()
        measure = cost.measure
        cost.measure = lambda loop_s: (measure(loop_s), looks.set())
        deadline_s = time.monotonic() + LIMIT_S
        while cost.call_s == USUAL_CALL_S:
            crowd.turn()
            assert time.monotonic() < deadline_s
        assert looks.is_set()
        assert 0.2 * USUAL_CALL_S <= cost.call_s <= 2.5 * USUAL_CALL_S
        until(lambda: hub.leading.ledger.hub.clocks.call_s == cost.call_s, "the cost at the hub", LIMIT_S)
        crowd.close()


def test_a_push_with_more_blocks_than_a_node_can_have_is_refused_and_changes_nothing(tmp_path):
    with leading_hub(tmp_path, template=RUN) as hub:
        client = hub.node().found()
        client.seqs[0] += 1
        data = np.full(client.numels[0], 1e-3, np.float32).tobytes()
        head = pb.PushHead(who=client.who, unit=0, seq=client.seqs[0], base=1, steps=1, codec="fp32")
        head.num_bytes = len(data)
        head.consumed.extend(pb.Consumed(start=i, upto=i + 1) for i in range(2000))
        with pytest.raises(HubRefused, match="2000 blocks in one message: a node has at most 1024 leases"):
            client.hub.push(head, memoryview(data))
        del head.consumed[1:]
        assert client.hub.push(head, memoryview(data)).accepted
        client.hub.close()


# --- a long step of the trainer


def long_step(scene, *, num_reports, computing=True, **plan):
    """Return the interval after so many reports of the same number of steps."""
    scene.node._plan = replace(scene.node._plan, **({"standbys": ()} | plan))
    scene.node.is_computing = lambda: computing
    owner = Owner()
    owner.report = lambda part: pb.HeartbeatRequest(steps=3)
    for _ in range(num_reports):
        scene.node.turn(owner)
    return scene.node.interval_s()


def test_in_a_long_step_a_node_reports_more_and_more_rarely_but_often_enough_to_stay_a_member(tmp_path):
    settings = {"swarm": False, "heartbeat_s": 0.125, "expire_s": 15.0}
    found = [long_step(Scene(tmp_path, **settings), num_reports=n) for n in (1, 2, 3, 4, 9)]
    assert found == [0.5, 1.0, 2.0, 3.0, 3.0], "five reports at least in `expire_s`"
    assert long_step(Scene(tmp_path, **settings), num_reports=9, round_s=8.0) == 2.0, "it learns of rounds"
    assert long_step(Scene(tmp_path, **settings | {"expire_s": 600.0}), num_reports=9) == 4.0


def test_a_node_that_needs_nothing_reports_every_fourth_time_and_when_the_next_round_opens(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: 50.0))
    settings = {"swarm": False, "heartbeat_s": 0.5, "expire_s": 15.0}
    assert long_step(Scene(tmp_path, **settings), num_reports=1) == 2.0
    scene = Scene(tmp_path, **settings)
    scene.node._owner = Fast()
    scene.node._owner.steps_per_s = 64.0
    scene.node._plan = replace(scene.node._plan, steps_ahead=256)
    assert long_step(scene, num_reports=1) == 1.0, "a quarter of the steps that its samples last for"
    for elapsed_s, expected in ((99.0, 1.05), (91.0, 2.0), (100.0, 2.0), (float("nan"), 2.0)):
        scene = Scene(tmp_path, **settings)
        scene.hubs["a:1"].heartbeat = lambda request, timeout_s, s=elapsed_s: pb.News(term=1, elapsed_s=s)
        assert long_step(scene, num_reports=1, round_s=10.0) == pytest.approx(expected)


@pytest.mark.parametrize("why", [{"computing": False}, {"standbys": ("b:1",)}, {"replicas": "somewhere"}])
def test_a_node_that_waits_or_whose_hub_may_be_replaced_reports_as_often_as_configured(tmp_path, why):
    scene = Scene(tmp_path, swarm=False, heartbeat_s=0.5, expire_s=15.0)
    assert long_step(scene, num_reports=9, **why) == 0.5


def test_the_end_of_a_long_step_is_reported_soon(tmp_path):
    scene = Scene(tmp_path, swarm=False, heartbeat_s=0.5, expire_s=15.0)
    long_step(scene, num_reports=9)
    scene.node._hurry.clear()
    scene.node.has_stepped()
    assert scene.node._hurry.is_set()
    scene.node._hurry.clear()
    scene.node.has_stepped()
    assert not scene.node._hurry.is_set(), "the next step is reported at the usual time"


@pytest.mark.parametrize(("schedule", "expected"), [("seconds", 8.0), ("steps", 0.0)])
def test_the_plan_of_an_agent_says_how_far_rounds_by_the_clock_are_apart(schedule, expected):
    edit, hub = EditConfig(units=("0",), schedule=schedule, every=8), HubConfig(address="127.0.0.1:1")
    settings = HubSettings(run="run", edit=edit, hub=hub)
    plan = node_plan(torch.nn.Sequential(torch.nn.Linear(2, 2)), settings, HubNodeOptions(name="a"))
    assert plan.round_s == expected
