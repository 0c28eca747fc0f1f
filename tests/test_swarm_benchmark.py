"""Tests the accounts of `benchmarks.swarm`: bytes between peers, waits, losses at equal tokens and time."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from benchmarks import swarm
from benchmarks.programs.optimizer_peer import Counter, OuterStep, PeerOutcome, Story
from benchmarks.swarm import AVERAGES, PARTS, Outcome, Race, toml
from kit.waiting import until

from aedit.async_sgd.rules import OuterConfig
from aedit.launch.config import RunConfig, load

SS = (
    'ESTAB 0      0      127.0.0.1:40000 127.0.0.1:50000 users:(("python",pid=7,fd=16))'
    " bbr wscale:10,10 bytes_sent:14762 bytes_retrans:10 bytes_acked:14753 bytes_received:15\n"
    'ESTAB 0      12     127.0.0.1:50000 127.0.0.1:40000 users:(("p2pd",pid=9,fd=3),("python",pid=8,fd=3))'
    " cubic bytes_received:14752 segs_out:3\n"
    "ESTAB 0      0      127.0.0.1:60000 127.0.0.1:60001 cubic bytes_sent:5\n"
)
SENDER = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
taken, _ = listening.accept()
taken.sendall(bytes(1_000_000))
time.sleep(60)
"""
TAKER = """
import socket, sys, time
taken = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
while taken.recv(2**16):
    pass
"""


def peer(steps=10, waited_s=1.0, wall_s=100.0, losses=(), tokens=1000.0):
    progress = ((0.0, 0.0), (100.0, tokens))
    return PeerOutcome(steps, waited_s, wall_s, progress, losses, rounds=3, failed=1)


def test_connections_are_read_with_the_process_and_what_it_has_sent():
    first, second = swarm.parsed(SS)
    assert first == swarm.Connection("127.0.0.1:40000", "127.0.0.1:50000", 7, 14752)
    assert (second.pid, second.sent) == (9, 0)


def test_only_bytes_between_different_peers_count(monkeypatch):
    monkeypatch.setattr(swarm, "peer_of", {1: 0, 2: 1, 3: 0, 4: None}.get)
    counted = swarm.Traffic()
    counted.take([swarm.Connection("a:1", "b:1", 1, 10), swarm.Connection("b:1", "a:1", 2, 7)])
    inside = [swarm.Connection("a:2", "a:3", 1, 100), swarm.Connection("a:3", "a:2", 3, 100)]
    counted.take([*inside, swarm.Connection("a:4", "c:1", 1, 50), swarm.Connection("c:1", "a:4", 4, 50)])
    counted.take([swarm.Connection("a:1", "b:1", 1, 25), swarm.Connection("b:1", "a:1", 2, 7)])
    assert counted.per_peer(2) == [25, 7]


@pytest.mark.skipif(swarm.why_not() is not None, reason="needs ss")
def test_bytes_between_real_processes_are_those_that_were_sent():
    words = [sys.executable, "-c", SENDER, "local-0"]
    sender = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    taker = subprocess.Popen([sys.executable, "-c", TAKER, "local-1", sender.stdout.readline().strip()])
    try:
        with swarm.Traffic() as counted:
            until(lambda: counted.per_peer(2)[0] == 1_000_000, "a megabyte")
            assert counted.per_peer(2)[1] == 0
    finally:
        for process in (sender, taker):
            process.kill()
            process.communicate()


def test_losses_are_compared_at_equal_tokens_and_at_equal_time():
    slow = Outcome((peer(losses=((0.0, 5.0), (100.0, 3.0)), tokens=1000.0), peer(tokens=3000.0)), (1, 2))
    fast = Outcome((peer(losses=((0.0, 5.0), (100.0, 1.0)), tokens=4000.0), peer(tokens=4000.0)), (1, 2))
    assert (slow.tokens, fast.tokens) == (4000.0, 8000.0)
    both = {"a": slow, "b": fast}
    assert swarm.equal_tokens(both) == 4000.0
    assert [each.loss_at_tokens(4000.0) for each in both.values()] == [3.0, 3.0]
    assert [each.loss_at_time(100.0) for each in both.values()] == [3.0, 1.0]


def test_waiting_is_a_share_of_the_time_of_all_and_the_bars_name_what_is_missed():
    losses = ((0.0, 5.0), (100.0, 2.0))
    good = Outcome((peer(waited_s=0.5, losses=losses, tokens=500.0), peer(waited_s=1.5, tokens=500.0)), (1,))
    bad = Outcome((peer(waited_s=30.0, losses=((0.0, 5.0), (100.0, 2.5))),), (1,))
    assert (good.stall, good.worst_stall) == (0.01, 0.015)
    names = (swarm.OURS, swarm.OVERLAPPED)
    assert [bar.passed for bar in swarm.bars(dict(zip(names, (good, bad), strict=True)), Race(), False)] == [
        True,
        True,
        True,
    ]
    missed = swarm.bars(dict(zip(names, (bad, good), strict=True)), Race(), False)
    assert [bar.passed for bar in missed] == [False, False, False]
    assert "trainers wait 30.00 % of the time" in missed[0].text


def test_long_calls_of_the_optimizer_are_waits_and_the_scatter_of_short_ones_is_not():
    story = Story(began_s=0.0, spans_s=[0.01, 0.02, 0.03, 0.02, 5.02])
    assert story.outcome().waited_s == pytest.approx(5.0)


def test_the_outer_step_is_nesterovs_on_the_way_from_the_last_anchor_to_the_average():
    model, rng = torch.nn.Linear(3, 2, bias=False), np.random.default_rng(0)
    outer = OuterStep(model, RunConfig(outer=OuterConfig(lr=0.7, momentum=0.9)))
    anchor, velocity = model.weight.detach().double().numpy().copy(), np.zeros((2, 3))
    for _ in range(3):
        average = rng.standard_normal((2, 3)).astype(np.float32)
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(average))
        outer.take()
        way = anchor - average
        velocity = 0.9 * velocity + way
        anchor = anchor - 0.7 * (way + 0.9 * velocity)
        np.testing.assert_allclose(model.weight.detach().numpy(), anchor, rtol=1e-5, atol=1e-6)


def test_rounds_of_the_optimizer_are_counted_by_what_hivemind_logs():
    import logging

    story = Story()
    log = logging.Logger("hivemind.optim.state_averager")
    log.addHandler(Counter(story))
    for text in ("Averaged parameters with 4 peers", "Averaging failed with <class 'TimeoutError'>", "Hello"):
        log.info(text)
    assert (story.rounds, story.failed) == (2, 1)


@pytest.mark.parametrize("more", [PARTS, AVERAGES, ""])
def test_the_configurations_of_the_race_are_valid(tmp_path, more):
    path = toml(Race(), tmp_path, "x", more)
    config = load(path, [], strict=True).config
    assert config.train.seconds == Race().seconds
    assert (config.swarm.has_parts, config.swarm.on) == (more == PARTS, more in (PARTS, AVERAGES))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(swarm.why_not() is not None, reason="needs ss")
def test_the_race_runs_and_prints_a_row_for_each_way():
    report = swarm.measure(True)
    assert [row[0] for row in report.rows] == [
        swarm.OURS,
        swarm.OVERLAPPED,
        swarm.WAITING,
        swarm.OPTIMIZER,
        swarm.OPENDILOCO,
    ]
    assert all(bar.passed is None for bar in report.bars)
