"""Tests of the process with hivemind's averager: programs that play it, and real ones on loopback."""

import importlib.util
import json
import os
import signal
import sys
import time
from contextlib import closing, suppress

import numpy as np
import psutil
import pytest
from kit.waiting import until

from aedit.proto.dht import AveragingSettings, HivemindAverager, averaging
from aedit.proto.dht.averaging import APART, Comparison
from aedit.proto.dht.averaging_process import distance, sketch
from aedit.types import UserError

MADDR = "/ip4/127.0.0.1/tcp/7/p2p/12D3KooWRZkapaYLTr2WiU5AsdKoHJSSqyxkCZ7uiiEm7nB4RDGQ"
PLAYED = """
import json, sys, time
settings = json.loads(sys.stdin.readline())
def say(**message):
    print(json.dumps(message), flush=True)
def ask():
    return json.loads(sys.stdin.readline())
def average(values, offset):
    import struct
    with open(settings["memory"], "r+b") as memory:
        memory.seek(4 * settings["numel"])
        memory.write(struct.pack(f"<{settings['numel']}f", *values))
say(maddrs=[MADDR])
"""


def settings(directory, **changes):
    base = {"name": "a", "prefix": "p", "numel": 3, "directory": directory}
    return AveragingSettings(**base | changes)


def played(directory, program, **changes):
    """Return an averager whose process is `program`, once it is up."""
    words = (sys.executable, "-S", "-c", PLAYED.replace("MADDR", repr(MADDR)) + program)
    averager = HivemindAverager(settings(directory, **changes), command=words)
    assert averager.wait_until_up(30.0)
    return averager


def ended(averager, number, limit_s=30.0):
    return until(lambda: averager.outcome(number), f"the end of round {number}", limit_s=limit_s)


REPLY = f"""
number = ask()["round"]
end = dict(why="", seconds=0.5, late=False, began_s=7.0, neighbours=[{MADDR!r}])
say(round=number - 1, members=3, **end)
say(round=number, members=2, **end)
"""


def test_a_round_gives_its_own_average_and_what_others_have_received(tmp_path):
    program = "average([1, 2, 3], 1)\n" + REPLY
    program += "say(compared=1, members=2, distances=[0.5])\nask()"
    with closing(played(tmp_path, program)) as averager:
        averager.start(1, 5, 8.0)
        end = ended(averager, 1)
        assert (end.members, end.began_s, end.why) == (2, 7.0, "")
        assert averager.average.tolist() == [1, 2, 3]
        assert averager.outcome(2) is None
        said = until(averager.comparisons, "the comparison")
        assert said == [Comparison(number=1, members=2, distances=(0.5,))]
        assert json.loads((tmp_path / "known_peers.json").read_text()) == [MADDR]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_an_average_that_is_not_finite_is_refused(tmp_path, value):
    with closing(played(tmp_path, f"average([1, float('{value}'), 3], 1)\n{REPLY}ask()")) as averager:
        averager.start(1, 5, 0.0)
        end = ended(averager, 1)
        assert (end.members, end.why) == (0, "the average of the peers is not finite")


def test_a_round_while_the_process_is_not_up_fails_at_once(tmp_path):
    words = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    with closing(HivemindAverager(settings(tmp_path), command=words)) as averager:
        assert not averager.wait_until_up(0.01)
        averager.start(1, 5, 0.0)
        assert averager.outcome(1).why == "its process is not up"


def test_a_process_that_hangs_fails_its_round_at_the_deadline_and_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(averaging, "_LATE_S", 0.1)
    monkeypatch.setattr(averaging, "_FIRST_PAUSE_S", 0.01)
    with closing(played(tmp_path, "ask(); time.sleep(60)", total_s=0.2)) as averager:
        averager.start(1, 5, 0.0)
        assert ended(averager, 1).why == "no answer within 0.2 s"
        assert averager.wait_until_up(30.0)


def test_a_process_that_dies_in_a_round_fails_it(tmp_path):
    with closing(played(tmp_path, "ask(); say(error='it broke')")) as averager:
        averager.start(1, 5, 0.0)
        end = ended(averager, 1)
        assert (end.members, end.why) == (0, "it broke")


def test_peers_that_were_known_before_are_asked_in_every_second_attempt(tmp_path):
    (tmp_path / "known_peers.json").write_text(json.dumps([MADDR]))
    first = MADDR.replace("/7/", "/8/")
    with closing(played(tmp_path, "ask()", initial_peers=(first,))) as averager:
        assert averager._initial_peers() == [first, MADDR]
        averager.failures = 1
        assert averager._initial_peers() == [first]


def test_hivemind_that_is_not_installed_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs hivemind: pip install 'aedit\[swarm\]'"):
        HivemindAverager(settings(tmp_path))


def test_the_distance_of_sketches_estimates_that_of_vectors():
    random = np.random.default_rng(5)
    a = random.normal(size=20_000).astype(np.float32)
    for relative in (1e-4, 1e-2, 1.0):
        b = a + relative * random.normal(size=a.size).astype(np.float32)
        true = np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(a)
        assert distance(sketch(a), sketch(b)) == pytest.approx(true, rel=0.25)


def test_averages_that_differ_by_rounding_are_equal_and_a_patch_of_another_one_is_not():
    random = np.random.default_rng(6)
    mean = random.normal(size=50_000)
    own, other = (random.normal(size=mean.size).astype(np.float32) for _ in range(2))
    rounded = [(mean.astype(np.float32) - one) + one for one in (own, other)]  # as hivemind computes it
    assert (rounded[0] != rounded[1]).any()
    assert distance(*map(sketch, rounded)) < APART / 10
    patched = rounded[0].copy()
    patched[:500] = own[:500]  # the part of a peer that was lost
    assert distance(sketch(rounded[0]), sketch(patched)) > APART
    assert distance(sketch(own), np.full_like(sketch(own), np.nan)) == float("inf")
    assert Comparison(number=1, members=4, distances=(1e-8, float("nan"), 1e-3)).differ == 2


# -- real processes


class Real:
    """An averager with hivemind."""

    def __init__(self, directory, *initial, numel=50_000, **changes):
        quick = {"match_s": 3.0, "request_s": 1.5, "chunk_s": 3.0, "total_s": 40.0}
        changes = quick | {"name": directory.name} | changes
        self.averager = HivemindAverager(settings(directory, numel=numel, initial_peers=initial, **changes))
        self.directory = directory

    def up(self):
        assert self.averager.wait_until_up(90.0)
        return (self.directory / averaging.INTRODUCTION).read_text()

    def processes(self):
        mine = psutil.Process()
        words = "aedit.proto.dht.averaging_process"
        found = [p for p in mine.children() if words in p.cmdline()]
        return found


def team(tmp_path, count, **changes):
    """Return averagers that know each other."""
    first = Real(tmp_path / "p0", **changes)
    maddr = first.up()
    others = [Real(tmp_path / f"p{i}", maddr, **changes) for i in range(1, count)]
    for other in others:
        other.up()
    return [first, *others]


def close_all(peers):
    began = psutil.Process().children(recursive=True)
    for peer in peers:
        peer.averager.close()
    _, alive = psutil.wait_procs(began, timeout=10)
    assert not [p for p in alive if "multiprocessing" not in " ".join(p.cmdline())]


@pytest.mark.slow
def test_real_peers_receive_their_weighted_mean_and_agree_about_it(tmp_path):
    peers = team(tmp_path, 3)
    try:
        random = np.random.default_rng(1)
        for number in (1, 2):
            for i, peer in enumerate(peers):
                peer.averager.sent[:] = random.normal(size=peer.averager.sent.size)
                peer.averager.start(number, i + 1, 100.0 - i)
            ends = [ended(peer.averager, number, 60.0) for peer in peers]
            assert [(end.members, end.began_s) for end in ends] == [(3, 98.0)] * 3
            want = sum((i + 1) * p.averager.sent.astype(np.float64) for i, p in enumerate(peers)) / 6
            for peer in peers:
                np.testing.assert_allclose(peer.averager.average, want, rtol=0, atol=3e-6)
            said = [until(peer.averager.comparisons, "the comparison") for peer in peers]
            assert all(len(one.distances) == 2 and one.differ == 0 for (one,) in said)
    finally:
        close_all(peers)


@pytest.mark.slow
def test_a_peer_that_is_killed_in_a_round_does_not_hang_the_others(tmp_path):
    peers = team(tmp_path, 3, numel=20_000_000)
    try:
        for peer in peers:
            peer.averager.start(1, 1, 0.0)
        victim = next(p for p in psutil.Process().children() if os.getsid(p.pid) == p.pid)
        time.sleep(3.6)  # matching takes 3 s, and this is after it
        os.killpg(victim.pid, signal.SIGKILL)
        began_s = time.monotonic()
        ends = [ended(peer.averager, 1, 60.0) for peer in peers]
        assert time.monotonic() - began_s < 46
        assert any(end.members == 0 for end in ends)
        for peer in peers:
            peer.up()
        for peer in peers:
            peer.averager.sent[:] = 1.0
            peer.averager.start(2, 1, 0.0)
        assert all(ended(peer.averager, 2, 60.0).number == 2 for peer in peers)
    finally:
        close_all(peers)


@pytest.mark.slow
def test_nan_from_a_peer_is_refused_by_the_others(tmp_path):
    peers = team(tmp_path, 2)
    try:
        peers[1].averager.sent[:] = 1.0
        peers[0].averager.sent[:] = np.nan
        for peer in peers:
            peer.averager.start(1, 1, 0.0)
        assert ended(peers[1].averager, 1, 60.0).why == "the average of the peers is not finite"
        assert np.isfinite(peers[1].averager.sent).all()
    finally:
        close_all(peers)


@pytest.mark.slow
def test_a_client_takes_part_without_listening(tmp_path):
    first = Real(tmp_path / "p0")
    client = Real(tmp_path / "p1", first.up(), client=True)
    try:
        assert client.up() == ""
        for i, peer in enumerate((first, client)):
            peer.averager.sent[:] = i
            peer.averager.start(1, 1, 0.0)
        for peer in (first, client):
            assert ended(peer.averager, 1, 60.0).members == 2
            np.testing.assert_allclose(peer.averager.average, 0.5, atol=1e-6)
    finally:
        close_all([first, client])


@pytest.mark.slow
def test_a_peer_whose_trainer_is_killed_leaves_no_process(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from aedit.proto.dht.averaging import AveragingSettings, HivemindAverager\n"
        "d = Path(sys.argv[1])\n"
        "a = HivemindAverager(AveragingSettings(name='a', prefix='p', numel=3, directory=d))\n"
        "time.sleep(300)"
    )
    trainer = psutil.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        until((tmp_path / averaging.INTRODUCTION).is_file, "hivemind", limit_s=90.0)
        started = trainer.children(recursive=True)
        assert len(started) >= 4
        trainer.kill()
        trainer.wait(10)
        _, alive = psutil.wait_procs(started, timeout=10)
        assert alive == []
    finally:
        with suppress(psutil.Error):
            trainer.kill()
