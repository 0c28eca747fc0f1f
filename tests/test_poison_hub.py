"""Tests one bad node of eight at a real hub: refused or bounded from the first round, unlike the others.

Also tests bad bytes at a hub process: whatever is incomplete, old or of another run changes nothing.
"""

import functools
import random

import grpc
import numpy as np
import psutil
import pytest
from benchmarks.poison import LIES, Collusion, attacks
from kit.hub_processes import Client, HubProcess, HubRefused, ending, numbers, write_run

from aedit.async_sgd.hub import NodeReport
from aedit.async_sgd.inprocess import InProcessHub, make_push
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig, StalenessConfig
from aedit.clock import VirtualClock
from aedit.proto.rpc import channel, frames
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import Layout, TensorLayout, UnitLayout

NODES, BAD, ROUNDS, NUMEL = 8, 7, 12, 6000
UNIT = UnitLayout("u", (TensorLayout("m", (50, 100)), TensorLayout("b", (1000,))))
LAYOUT = Layout((UNIT,))
PUT_OUT = {
    "nan",
    "inf",
    "1000 times",
    "10 times",
    "sign flipped, 10 times",
    "noise",
    "oversized",
    "other model",
}
EACH_ALONE = 'weights = "uniform"\ngrace = 0.0\n'
GOAL = np.random.default_rng(0).normal(size=NUMEL)


def run(quorum, tamper=None, nodes=NODES, bad=(BAD,), **settings):
    """Run nodes that pull the anchor towards the goal, each with its own noise; return the anchor's path."""
    settings = {"weights": "penalty" if quorum == "all" else "uniform"} | settings
    hub_config = HubConfig(quorum=quorum, staleness=StalenessConfig(rule="constant"), **settings)
    outer = OuterConfig(kind="average", lr=1.0)
    penalty = PenaltyConfig(clip=None)
    plan = HubPlan(hub=hub_config, outer=outer, penalty=penalty, every=16, pace="steps", steps=16 * ROUNDS)
    clock = VirtualClock()
    hub = InProcessHub(plan, LAYOUT, clock=clock)
    for node in range(nodes):
        hub.join(f"node-{node}")
    hub.offer(make_push(np.zeros(NUMEL, np.float32), UNIT, node=0, unit=0, seq=1, base=0, steps=0, tokens=0))
    rng = np.random.default_rng(1)
    for round in range(ROUNDS):
        clock.advance(1.0)
        version, anchor = hub.hub.anchor(0)
        noise = rng.normal(size=(NODES, NUMEL))  # the same for the others, whatever one of them does
        for node in hub.hub.state.live:
            hub.heartbeat(node, NodeReport(state="training"))
        for node in list(hub.hub.state.live):
            if node not in hub.hub.state.live:
                continue  # excluded by a merge of this round
            D = 0.2 * (anchor - GOAL) + 0.1 * noise[node]
            facts = {"node": node, "unit": 0, "seq": round + 1 + (node == 0), "base": version}
            push = make_push(D.astype(np.float32), UNIT, steps=16, tokens=160, **facts)
            hub.offer(tamper(push, UNIT) if tamper and node in bad else push)
    return hub, float(np.linalg.norm(hub.hub.anchor(0)[1] - GOAL))


@functools.cache
def distance_of(quorum, **settings):
    """Return how far from the goal a run without bad nodes ends."""
    return run(quorum, **settings)[1]


@pytest.fixture(scope="module", params=["all", 1], ids=["quorum", "every arrival"])
def quorum(request):
    return request.param


@pytest.mark.parametrize("name", attacks())
def test_one_bad_node_of_eight_is_refused_or_bounded_and_the_others_are_not(name, quorum):
    hub, distance = run(quorum, attacks()[name])
    clean = distance_of(quorum)
    blamed = {node for node, _ in hub.tally.refused} | set(hub.tally.ignored)
    assert blamed <= {BAD}
    start = float(np.linalg.norm(GOAL))
    assert clean < 0.2 * start
    assert distance - clean < 0.1 * start
    if name in PUT_OUT:
        assert blamed == {BAD}


@pytest.mark.parametrize("name", ["nan", "inf", "1000 times", "noise", "oversized", "other model"])
def test_what_is_crude_never_reaches_the_anchor(name, quorum):
    hub, distance = run(quorum, attacks()[name])
    assert distance == pytest.approx(distance_of(quorum, nodes=NODES - 1), rel=0.05)
    if quorum == 1:
        assert BAD not in hub.tally.accepted


ROBUST = ("trimmed", "median", "geometric-median", "multi-krum", "centered-clip")


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("merge", ["mean", *ROBUST])
def test_liars_who_know_all_honest_pushes_do_not_keep_the_others_from_their_goal(lie, liars, merge):
    bad = frozenset(range(NODES - liars, NODES))
    settings = {"merge": merge, "merge_cut": 0.25} if merge != "mean" else {}
    hub, distance = run("all", Collusion(lie, bad, NODES).tamper, bad=range(NODES), **settings)
    blamed = {node for node, _ in hub.tally.refused} | set(hub.tally.ignored)
    assert blamed <= bad
    most = 0.25 if lie == "ALIE" else 0.2  # which hides in the spread and moves medians most
    assert distance < most * float(np.linalg.norm(GOAL))
    if lie in ("sign flip", "IPM 0.5", "random, 60 times"):
        assert blamed == bad


@pytest.mark.parametrize("quorum", [1, "all"])
@pytest.mark.parametrize("weights", ["penalty", "steps", "uniform"])
def test_a_random_vector_of_60_times_that_claims_many_steps_costs_next_to_nothing(quorum, weights):
    lie = Collusion("random, 60 times", frozenset({BAD}), NODES).tamper
    _, distance = run(quorum, lie, bad=range(NODES), weights=weights)
    _, clean = run(quorum, weights=weights)
    assert distance - clean < 0.02 * float(np.linalg.norm(GOAL))


# --- on the wire

NUMELS = (5000, 70)
NO_RATE = "[hub.limits]\ncalls_per_s = 1e9\n"
PATIENT = "[hub.push_filter]\nviolations = 1000\n"


def sent(line, head, data, damage=lambda message: message):
    """Return the hub's answer, or error, to a push of these bytes, each message damaged."""
    messages = [
        frames.pack_chunk(c)
        for c in frames.chunks(head.SerializeToString(), memoryview(data), chunk_bytes=8192)
    ]
    try:
        call = line.stream_unary("/aedit.v1.Exchange/Push")
        return pb.PushReply.FromString(call(iter([damage(message) for message in messages]), timeout=30))
    except grpc.RpcError as error:
        return error.code().name, error.details()


def head_of(client, unit, **others):
    """Return the head of the client's next push."""
    facts = {"seq": client.seqs[unit] + 1, "base": 1, "steps": 1, "tokens": 10, "codec": "fp32"} | others
    return pb.PushHead(who=client.who, unit=unit, **{"num_bytes": 4 * NUMELS[unit]} | facts)


def one_bit(chance):
    def damage(message):
        damaged, at = bytearray(message), chance.randrange(8 * len(message))
        damaged[at // 8] ^= 1 << at % 8
        return bytes(damaged)

    return damage


def by_hand(pushes, share=1 / 2):
    """Return the anchors after these pushes one by one, by algorithm 3 of arXiv:2401.09135 as written.

    share: of a round that each push is, of which the algorithm takes n for a whole one.
    """
    anchors, lr, mu, n = [numbers(u, 1, NUMELS[u]).astype(np.float64) for u in (0, 1)], 0.8, 0.85, 4
    for unit in (0, 1):
        momentum = pending = np.zeros(NUMELS[unit])
        for t, seq in enumerate((s for u, s in pushes if u == unit), start=1):
            g = n * share * 0.01 * numbers(unit, seq, NUMELS[unit]).astype(np.float64)
            pending = pending + g
            step = lr * g / n
            if t % n == 0:
                momentum, pending = mu * momentum + pending / n, np.zeros(NUMELS[unit])
                step = step + lr * mu * momentum
            anchors[unit] -= step
    return anchors


def test_bytes_that_are_damaged_or_not_of_this_run_change_nothing_and_a_good_node_goes_on(tmp_path):
    chance = random.Random(0)
    hub = HubProcess(write_run(tmp_path, EACH_ALONE + NO_RATE + PATIENT), tmp_path / "hub")
    with ending(), channel(hub.address, None) as line:
        good, bad = Client(hub.address, "good").found(), Client(hub.address, "bad")
        bad.join()
        data = (0.01 * numbers(0, 1, NUMELS[0])).astype(np.float32).tobytes()
        for _ in range(40):
            code, text = sent(line, head_of(bad, 0), data, one_bit(chance))
            assert code in ("DATA_LOSS", "INVALID_ARGUMENT"), text
        good.merged(0)
        _declarations_that_are_too_large_are_refused_before_there_is_room(hub, line, bad, data)
        good.merged(1)
        _a_push_of_another_is_not_believed_and_one_sent_again_counts_once(line, good, bad, data)
        for numels, words in (((5000, 71), r"unit1.w \(71,\)"), ((5000,), "unit"), ((70, 5000), "unit0.w")):
            with pytest.raises(HubRefused, match=words):
                Client(hub.address, "bad", numels).join()
        good.merged(0)
        newest = head_of(bad, 0, base=bad.version(0))
        assert sent(line, newest, data).accepted  # undamaged it is a push like any other
        status = {node["name"]: node for node in good.status()["nodes"]}
        served = [good.anchor(unit)[1] for unit in (0, 1)]
        hub.kill()
    assert status["good"]["refused"] == {}
    named = status["bad"]["refused"]
    assert named["damaged"] >= 36  # the other bits were of what says who it is, or that it is a push
    assert named["malformed"] >= 21
    assert (status["good"]["accepted"], status["bad"]["accepted"]) == (5, 1)
    log = hub.log.read_text()
    assert "Traceback" not in log
    assert "checksum" in log
    expected = by_hand([(0, 2), (1, 2), (0, 3), (0, 1)])
    for unit in (0, 1):
        np.testing.assert_allclose(served[unit], expected[unit], atol=1e-6)


def test_who_sends_damaged_bytes_again_and_again_is_put_out_and_no_other_can_do_it_to_him(
    tmp_path,
):
    chance = random.Random(1)
    hub = HubProcess(write_run(tmp_path, NO_RATE), tmp_path / "hub")
    with ending(), channel(hub.address, None) as line:
        good, bad = Client(hub.address, "good").found(), Client(hub.address, "bad")
        bad.join()
        data = numbers(0, 1, NUMELS[0]).tobytes()
        forged = head_of(good, 0)
        forged.who.session += 1
        for _ in range(20):
            sent(line, forged, data[:-4])
        for _ in range(20):
            sent(line, head_of(bad, 0), data, one_bit(chance))
        code, text = sent(line, head_of(bad, 0), data)  # even if it is whole
        status = {node["name"]: node for node in good.status()["nodes"]}
        good.merged(0)
    assert code == "PERMISSION_DENIED"
    assert "excluded after 8 violations, the last one damaged" in text
    assert "excluded" in status["bad"]["state"]
    assert status["bad"]["refused"] == {"damaged": 8}
    assert status["good"]["refused"] == {}


def _declarations_that_are_too_large_are_refused_before_there_is_room(hub, line, bad, data):
    before = psutil.Process(hub.process.pid).memory_info().rss
    for num_bytes in (4 * NUMELS[0] + 10**6, 2**33, 2**40, 2**63):
        for _ in range(5):
            code, text = sent(line, head_of(bad, 0, num_bytes=num_bytes), data)
            assert (code, "declared" in text) == ("INVALID_ARGUMENT", True)
    code, text = sent(line, head_of(bad, 0, num_bytes=4 * NUMELS[0] - 4), data)  # and more comes than that
    assert (code, "a chunk of" in text) == ("INVALID_ARGUMENT", True)
    assert psutil.Process(hub.process.pid).memory_info().rss < before + 2**25


def _a_push_of_another_is_not_believed_and_one_sent_again_counts_once(line, good, bad, data):
    again = head_of(good, 0, seq=good.seqs[0])
    version = good.version(0)
    for _ in range(10):
        assert sent(line, again, data).accepted  # the answer that its first sender may have missed
    assert good.version(0) == version
    for session in (0, bad.who.session, good.who.session + 1000, 2**64 - 1):
        foreign = head_of(good, 0)
        foreign.who.session = session
        code, text = sent(line, foreign, data)
        assert code in ("NOT_FOUND", "ABORTED"), text
    old = head_of(bad, 0)
    bad.join()
    code, text = sent(line, old, data)
    assert code == "ABORTED", text
    assert good.version(0) == version
