"""Tests the limits of one peer: calls, bytes, and time; any message gets an answer or a refusal."""

import random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.wire import MemoryCore, noise

from aedit.proto.rpc import Limits, Rates, channel, frames, hub_pb2, serve
from aedit.proto.rpc.limits import ByteBudget, StallWatch


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_stretch_of_time_sees_more_calls_than_the_rate_and_one_burst(pauses):
    clock, times = Clock(), []
    rates = Rates(4.0, clock=clock)
    for pause_s in pauses:
        clock.now_s += pause_s
        if rates.allow("node"):
            times.append(clock.now_s)
    for i, begin_s in enumerate(times):
        for j in range(i, len(times)):
            assert j - i + 1 <= 4 + 4 * (times[j] - begin_s) + 1e-6


def test_who_waits_may_call_again_and_others_need_not_wait():
    clock = Clock()
    rates = Rates(2.0, clock=clock)
    assert [rates.allow("a") for _ in range(3)] == [True, True, False]
    assert rates.allow("b")
    clock.now_s = 0.5
    assert [rates.allow("a") for _ in range(2)] == [True, False]


def test_callers_without_number_take_no_memory_without_bound():
    rates = Rates(2.0, keys=10)
    for i in range(1000):
        rates.allow(i)
    assert len(rates._buckets) == 10


def test_bytes_above_the_budget_wait_until_some_are_given_back():
    budget = ByteBudget(10)
    assert [budget.take(n) for n in (6, 4, 1)] == [True, True, False]
    budget.give(4)
    assert budget.take(1)
    assert budget.taken == 7


def test_what_is_larger_than_the_budget_may_come_alone():
    budget = ByteBudget(10)
    assert budget.take(11)
    assert not budget.take(0)
    budget.give(11)
    assert [budget.take(1), budget.take(11)] == [True, False]


@pytest.fixture
def watch():
    """Return a watch and its clock; its thread sleeps for an hour, so the tests decide when it checks."""
    clock = Clock()
    watch = StallWatch(3600.0, bytes_per_s=100.0, clock=clock)
    return watch, clock


def test_a_stream_that_stands_still_is_ended_once(watch):
    watch, clock = watch
    ended = []
    with watch.over(lambda: ended.append(clock.now_s)) as stream:
        for clock.now_s in (3599.0, 3600.0, 9000.0):
            watch.end_stalled()
        assert (ended, stream.stalled) == ([3600.0], True)


def test_a_stream_that_moves_fast_enough_goes_on(watch):
    watch, clock = watch
    ended = []
    with watch.over(lambda: ended.append(1)) as stream:
        for _ in range(10):
            clock.now_s += 3000.0
            stream.moved(300_000)
            watch.end_stalled()
        assert (ended, stream.stalled) == ([], False)
        clock.now_s += 3601.0
        watch.end_stalled()
        assert ended == [1]


def test_a_stream_that_moves_a_byte_at_a_time_is_ended(watch):
    watch, clock = watch
    ended = []
    with watch.over(lambda: ended.append(clock.now_s)) as stream:
        while not ended and clock.now_s < 20_000:
            clock.now_s += 1.0
            stream.moved(1)
            watch.end_stalled()
    assert 3600 <= ended[0] < 3700


def test_a_stream_that_is_over_is_not_ended(watch):
    watch, clock = watch
    ended = []
    with watch.over(lambda: ended.append(1)):
        pass
    clock.now_s = 9000.0
    watch.end_stalled()
    assert ended == []


def fuzzed(rng):
    """Return messages of the right type, damaged, or noise."""
    who = hub_pb2.Who(
        run="r", term=rng.getrandbits(64), node=rng.getrandbits(32), session=rng.getrandbits(64)
    )
    push = hub_pb2.PushHead(who=who, unit=rng.choice([0, 2**31]), num_bytes=rng.choice([0, 9, 2**63]))
    request = rng.choice(
        [
            hub_pb2.JoinRequest(who=who, name="n"),
            hub_pb2.PullRequest(who=who, unit=rng.choice([0, 5]), version=1, offset=rng.getrandbits(8)),
            hub_pb2.HeartbeatRequest(who=who),
            hub_pb2.Chunk(
                offset=rng.choice([0, 2**64 - 1]), data=rng.randbytes(9), head=push.SerializeToString()
            ),
        ]
    ).SerializeToString()
    if rng.random() < 0.5:
        return request
    damaged = bytearray(request or b"x")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.getrandbits(8)
    return bytes(damaged[: rng.randint(0, len(damaged))]) + rng.randbytes(rng.choice([0, 0, 3]))


UNARY = ["Membership/Join", "Membership/Heartbeat", "Membership/Lease", "State/Status", "State/Confirm"]
SAID = {"OK", "INVALID_ARGUMENT", "DATA_LOSS", "OUT_OF_RANGE"}


def test_whatever_arrives_is_answered_and_nothing_of_it_breaks_the_server(caplog):
    rng, core = random.Random(0), MemoryCore([noise(100)], 100)
    server = serve(core, "127.0.0.1:0", limits=Limits(calls_per_s=1e9))
    seen = set()
    try:
        with channel(server.address, None) as line:
            for _ in range(1500):
                try:
                    _send(line, rng)
                    seen.add("OK")
                except grpc.RpcError as error:
                    seen.add(error.code().name)
    finally:
        server.stop(0.0)
    assert seen == SAID
    # A line, not a flood and no traceback.
    assert 1 <= len(caplog.records) < 100
    assert not [record for record in caplog.records if record.exc_info]


def _send(line, rng):
    method = rng.choice([*UNARY, "Exchange/Push", "Exchange/Pull", "State/Tail"])
    path = f"/aedit.v1.{method}"
    if method == "Exchange/Push":
        line.stream_unary(path)(iter([fuzzed(rng) for _ in range(rng.randint(0, 2))]), timeout=10)
    elif method in UNARY:
        line.unary_unary(path)(fuzzed(rng), timeout=10)
    else:
        for message in line.unary_stream(path)(fuzzed(rng), timeout=10):
            assert method == "State/Tail" or frames.unpack_chunk(message).crc
