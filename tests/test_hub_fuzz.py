"""Tests a hub under invalid messages: it keeps running, does not grow, merges none, and serves good nodes."""

import random
from collections import Counter, deque

import grpc
import numpy as np
import psutil
import pytest
from kit.fuzz import PULL, PUSH, Fuzzer
from kit.hub_processes import Client, HubProcess, HubRefused, ending, write_run

from aedit.launch.hub import anchors_of
from aedit.proto.rpc import channel
from aedit.proto.rpc import hub_pb2 as pb

MORE = """
[hub.limits]
calls_per_s = 1e9
[hub.push_filter]
violations = 1000000
threshold = 1e9
"""
"""Limits that let most messages through, and a push filter without effect: the fuzzer's many names would
otherwise determine the usual norm."""
SAID = {
    "OK",
    "ABORTED",  # another session than the one it is said to be
    "ALREADY_EXISTS",  # the name of a live member
    "DATA_LOSS",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",  # too many members, or leases
}
NUMELS = (5000, 70)
SLOW = [pytest.mark.slow, pytest.mark.timeout(1500)]
UNDER_WAY = 16
ROUND = 250
"""Messages between two pushes of the good node."""
BETWEEN = 50
"""Messages until the fuzzer joins again, so that it knows the state of a member."""
MIB = 2**20


@pytest.mark.parametrize("messages", [2_000, pytest.param(100_000, marks=SLOW)])
def test_a_hub_answers_whatever_is_sent_and_neither_ends_nor_grows(tmp_path, messages):
    hub = HubProcess(write_run(tmp_path, MORE), tmp_path / "hub")
    with ending(), channel(hub.address, None) as line:
        good, liar = Client(hub.address, "good").found(), Client(hub.address, "liar")
        for _ in range(20):
            good.join()  # sessions are counted, and the first ones are easily guessed
        fuzzer, said = Fuzzer(random.Random(messages), NUMELS, liar.request()), Counter()
        sizes = []
        for _ in range(messages // ROUND):
            for _ in range(ROUND // BETWEEN):
                _renew(fuzzer, liar)
                said += _send(line, fuzzer, BETWEEN)
            for unit in range(len(NUMELS)):
                assert good.merged(unit).verdict == pb.MERGED
            sizes.append(_memory(hub))
        assert set(said) <= SAID, said
        assert said["OK"] > messages / 20, said
        served = [good.anchor(unit)[1] for unit in range(len(NUMELS))]
        hub.kill()
    some = [round(size / MIB) for size in sizes[:: max(1, len(sizes) // 20)]]
    print(f"{messages} messages: {dict(said)}; MiB: {some}")
    assert "Traceback" not in hub.log.read_text()
    warm, last = sizes[len(sizes) // 10 : len(sizes) // 4], sizes[-len(sizes) // 10 :]
    assert max(last) < 1.05 * max(warm) + 8 * MIB, sizes
    assert all(np.isfinite(anchor).all() for anchor in served)
    kept = anchors_of(tmp_path / "hub")
    assert all(np.array_equal(anchor, kept[unit]) for unit, anchor in enumerate(served))


def test_what_one_node_says_of_itself_stops_no_other(tmp_path):
    hub = HubProcess(write_run(tmp_path, MORE), tmp_path / "hub")
    with ending():
        good, liar = Client(hub.address, "good").found(), Client(hub.address, "liar")
        liar.join()
        liar.hub.heartbeat(
            pb.HeartbeatRequest(who=liar.who, steps_per_s=1e308, busy_s=float("nan"), loss=float("inf"))
        )
        data = np.full(NUMELS[1], 1e-3, np.float32).data.cast("B")
        head = pb.PushHead(who=liar.who, unit=1, seq=1, base=1, steps=1, codec="fp32", num_bytes=len(data))
        head.tokens = 2**64 - 1
        assert "tokens" in liar.hub.push(head, data).news.reason
        with pytest.raises(HubRefused, match="no standby"):  # it would be waited for
            liar.hub.confirm(pb.ConfirmRequest(segment=1))
        assert good.merged(0).verdict == pb.MERGED
        assert good.heartbeat().pace_steps >= 1
        assert [node["refused"] for node in good.status()["nodes"]] == [{}, {"tokens": 1}]


def _renew(fuzzer, liar):
    """Let the fuzzer speak for a member again, under another name if one of its messages has taken this."""
    try:
        reply = liar.join()
    except HubRefused as refused:
        if refused.code is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        stem, _, number = liar.name.partition("-")
        liar.name = f"{stem}-{int(number or 0) + 1}"
        reply = liar.join()
    fuzzer.who.CopyFrom(liar.who)
    fuzzer.seqs, fuzzer.versions = list(reply.seqs), list(reply.versions)


def _send(line, fuzzer, messages):
    """Send the messages; return the count of each answer."""
    said, under_way = Counter(), deque()
    for _ in range(messages):
        method, parts = fuzzer.call()
        under_way.append(_start(line, method, parts))
        if len(under_way) >= UNDER_WAY:
            said[_end(*under_way.popleft())] += 1
    for call in under_way:
        said[_end(*call)] += 1
    return said


def _start(line, method, parts):
    path = f"/aedit.v1.{method}"
    if method == PUSH:
        return method, line.stream_unary(path).future(iter(parts), timeout=30)
    if method == PULL:
        return method, line.unary_stream(path)(parts[0], timeout=30)
    return method, line.unary_unary(path).future(parts[0], timeout=30)


def _end(method, call):
    try:
        if method == PULL:
            deque(call, maxlen=0)
        else:
            call.result()
        return "OK"
    except grpc.RpcError as error:
        return error.code().name


def _memory(hub):
    """Return the bytes of the hub's own memory, without the journal's mapped pages."""
    info = psutil.Process(hub.process.pid).memory_info()
    return info.rss - info.shared
