"""Tests the hub as a process.

Killed at any time it restarts with equal bits, and refuses what does not fit.
"""

import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack

import grpc
import numpy as np
import pytest
from kit.full_disk import limit_files
from kit.hub_processes import Client, HubProcess, HubRefused, HubUnreachable, ending, hello, write_run
from kit.waiting import until

from aedit.launch.config import load, method
from aedit.launch.hub import anchors_of
from aedit.launch.hub.folder import pushes_of
from aedit.proto.rpc import PROTOCOL, HubClient
from aedit.proto.rpc import hub_pb2 as pb


def start(tmp_path, *words, more="", **values):
    return HubProcess(write_run(tmp_path, more, **values), tmp_path / "hub", *words)


def asking(settings):
    """Return the hello request of another build with these settings."""
    return pb.HelloRequest(protocol=PROTOCOL, version="9.9", method=pb.Method(settings=settings))


def test_a_hub_starts_without_torch():
    code = (
        "import sys, aedit.launch.hub.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip() == "[]"


def test_a_hub_killed_at_any_moment_loses_nothing_it_has_acknowledged(tmp_path):
    chance = random.Random(3)
    hub = start(tmp_path, snapshot_bytes=2**20)
    place = hub.address
    node = Client(place, numels=(60_000, 70)).found()
    over, newest = threading.Event(), [0, 0]
    failures = []

    def work():
        while not over.is_set():
            try:
                for unit in (0, 1):
                    version = node.merged(unit).version
                    assert version >= newest[unit], "a version has gone back"
                    newest[unit] = version
            except (HubUnreachable, HubRefused):
                rejoin()
            except Exception as error:
                failures.append(error)
                return

    def rejoin():
        while not over.is_set():
            try:
                node.join()
                return
            except (HubUnreachable, HubRefused):
                time.sleep(0.05)

    worker = threading.Thread(target=work)
    with ending():
        worker.start()
        for _ in range(4):
            seen = len(node.accepted)
            until(lambda seen=seen: len(node.accepted) > seen + 2 or failures, "pushes")
            time.sleep(chance.uniform(0.0, 0.5))
            hub.kill()
            hub = start(tmp_path, snapshot_bytes=2**20)
            assert hub.address == place  # those who know it find it again
        seen = len(node.accepted)
        until(lambda: len(node.accepted) > seen + 2 or failures, "pushes")
        over.set()
        worker.join(30)
        reader = Client(place, "reader", numels=(60_000, 70))
        reader.join()
        served = [reader.anchor(unit) for unit in (0, 1)]
        hub.kill()
    assert failures == []
    assert len(node.accepted) > 10
    anchors = anchors_of(tmp_path / "hub")
    for unit in (0, 1):
        assert np.array_equal(served[unit][1], anchors[unit])
    assert served[0][0] >= newest[0]


def test_accepted_pushes_are_all_in_the_journal_and_replaying_it_from_the_beginning_gives_the_anchors(
    tmp_path,
):
    hub = start(tmp_path)
    with ending():
        node = Client(hub.address).found()
        for _ in range(3):
            node.merged(0)
        node.push(1)
        hub.kill()
        hub = start(tmp_path)
        node.join()
        node.merged(0)
        anchor = node.anchor(0)[1]
        assert hub.stop() == 0  # writes a snapshot
    folder = tmp_path / "hub"
    assert [(push.node, push.unit, push.seq) for push in pushes_of(folder)] == node.accepted
    short, long = anchors_of(folder), anchors_of(folder, from_the_beginning=True)
    assert np.array_equal(short[0], anchor)
    assert all(np.array_equal(short[unit], long[unit]) for unit in (0, 1))


def test_a_push_that_is_sent_again_counts_once(tmp_path):
    hub = start(tmp_path)
    with ending():
        node = Client(hub.address).found()
        version = node.merged(0).version
        node.seqs[0] -= 1
        assert node.push(0).accepted
        hub.kill()
        hub = start(tmp_path)
        node.join()
        assert node.seqs[0] == 2
        node.seqs[0] -= 1
        assert node.push(0).accepted
        assert node.version(0) == version
    assert len([push for push in pushes_of(tmp_path / "hub") if push.unit == 0]) == 2


def fill(node):
    for _ in range(20):
        node.merged(0)


def test_a_full_disk_refuses_pushes_and_nothing_else(tmp_path):
    hub = start(tmp_path)
    with ending():
        limit_files(hub.process, 210 * 1024)
        node = Client(hub.address).found()
        # Told to come again until the deadline, which may come while it asks.
        with node.impatient(), pytest.raises(HubUnreachable, match=r"no space|Deadline Exceeded"):
            fill(node)
        before = node.anchor(0)
        assert node.heartbeat().nodes == 1
        assert hub.events("journal_full")
        hub.kill()
        hub = start(tmp_path)
        node.join()
        again = node.anchor(0)
        assert again[0] == before[0]
        assert np.array_equal(again[1], before[1])
        node.merged(0)
    kept = {(push.node, push.unit, push.seq) for push in pushes_of(tmp_path / "hub")}
    assert kept >= set(node.accepted)


def test_what_does_not_fit_is_refused_with_the_difference_named(tmp_path):
    hub = start(tmp_path)
    with ending():
        Client(hub.address).found()
        stranger = HubClient(hub.address, call_timeout_s=5.0)
        own = method(load(tmp_path / "run.toml", []).config)
        every = own.pop("edit.every")
        for request, words in (
            (pb.HelloRequest(protocol=PROTOCOL + 1), f"protocol {PROTOCOL + 1} .*hub has {PROTOCOL} "),
            (asking(own), f"edit.every is {every} at this hub .* and 128 here"),
            (asking(own | {"edit.every": "9.0"}), f"edit.every is {every} at this hub .* and 9.0 here"),
            (asking(own | {"edit.new": "3"}), f"edit.every is {every} at this hub"),
            (asking(own | {"edit.every": every, "a.new": "3"}), "a.new is its default at this hub .* and 3"),
        ):
            with pytest.raises(HubRefused, match=words) as refused:
                stranger.hello(request)
            assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        for request in (asking(own | {"edit.every": every}), pb.HelloRequest(protocol=PROTOCOL)):
            assert stranger.hello(request).protocol == PROTOCOL
        stranger.close()
        with pytest.raises(HubRefused, match="seed is 0 in this run and 1"):
            Client(hub.address, "b").join(seed="1")
        with pytest.raises(HubRefused, match=r"unit1.w \(71,\)"):
            Client(hub.address, "b", numels=(5000, 71)).join()
        other = Client(hub.address, "c")
        other.who.run = "another"
        with pytest.raises(HubRefused, match="leads the run 'run', not 'another'"):
            other.join()


def test_a_payload_that_is_none_and_numbers_that_are_none_are_not_believed(tmp_path):
    hub = start(tmp_path)
    with ending():
        node = Client(hub.address).found()

        def push(data, name="fp32", **others):
            head = pb.PushHead(who=node.who, unit=1, seq=2, base=1, codec=name, num_bytes=len(data), **others)
            return node.hub.push(head, memoryview(data))

        with pytest.raises(HubRefused, match="70 elements have 280"):
            push(bytes(276))
        with pytest.raises(HubRefused, match="'int8' where this run has 'fp32'"):
            push(bytes(72), "int8")
        reply = push(np.full(70, np.nan, np.float32).tobytes())
        assert not reply.accepted
        assert (reply.news.verdict, reply.news.reason[:10]) == (pb.DISTRUSTED, "not finite")
        assert hub.events("refused")[0]["reason"].startswith("not finite")
        assert node.status()["nodes"][0]["refused"] == {"malformed": 2, "not finite": 1}


def test_two_hubs_cannot_work_in_one_folder(tmp_path):
    hub = start(tmp_path)
    with ending():
        second = subprocess.run(hub.process.args, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert "another hub is running in this folder" in second.stderr
        assert Client(hub.address).join().founder


def test_a_folder_keeps_the_rules_that_its_journal_was_written_under(tmp_path):
    hub = start(tmp_path)
    with ending():
        assert hub.stop() == 0
    other = start(tmp_path, "--outer.lr=0.3")
    assert other.process.wait(60) == 2
    assert "outer.lr was 0.8 and cannot become 0.3" in other.log.read_text()
    third = start(tmp_path, "--hub.quorum=2")
    with ending():
        assert third.address
        assert third.stop() == 0


def test_a_hub_ends_with_its_run(tmp_path):
    hub = start(tmp_path, "--train.steps=2")
    with ending():
        node = Client(hub.address).found()
        for unit in (0, 1, 0, 1):
            node.merged(unit)
        assert node.heartbeat().finished
        node.leave()
        assert hub.process.wait(60) == 0


def test_hubs_that_split_the_units_own_every_other_one(tmp_path):
    toml = write_run(tmp_path)
    toml.write_text(toml.read_text().replace('"127.0.0.1:0"', '"127.0.0.1:0,127.0.0.1:0"'))
    hubs = [HubProcess(toml, tmp_path / f"hub_{k}", f"--part={k}/2") for k in (0, 1)]
    with ending():
        assert list(hello(hubs[1].address).addresses) == [hub.address for hub in hubs]
        for k in (0, 1):
            node = Client(hubs[k].address)
            assert node.join().founder
            assert node.push(k, base=0).accepted
            with pytest.raises(HubRefused, match=f"no unit {1 - k}"):
                node.push(1 - k, base=0)
            until(lambda node=node, k=k: node.version(k) == 1, "the first anchor")


def test_people_can_see_how_it_stands(tmp_path):
    hub = start(tmp_path, "--hub.metrics-port=0")
    with ending():
        node = Client(hub.address).found()
        node.merged(0)
        status = node.status()
        assert status["nodes"][0]["name"] == "node"
        assert [unit["version"] for unit in status["units"]] == [2, 1]
        expected = ["lead", "founded", "join", "first_anchor", "first_anchor"]
        assert [event["event"] for event in status["events"]] == expected
        assert status["events"][1]["t"] < 0.05, "the age of the run, not of the hub, as in the nodes' files"
        assert status["journal"]["bytes"] > 40_000
        lines = []
        until(
            lambda: lines.extend(node.status()["lines"]) or [2, 1] in [line["versions"] for line in lines],
            "a line of metrics after the merge",
        )
        written = (tmp_path / "hub" / "metrics.jsonl").read_text().splitlines()
        assert lines[-1] in [json.loads(line) for line in written]


def test_idle_connections_to_the_metrics_page_take_few_threads_and_are_ended(monkeypatch):
    """As found: each of 300 connections that sent nothing kept a thread, for ever."""
    from aedit.async_sgd.service import metrics_page

    monkeypatch.setattr(metrics_page.MetricsPage, "collect", lambda page: iter(()))
    page, before = metrics_page.MetricsPage(dict, "127.0.0.1", 0), threading.active_count()
    try:
        with ExitStack() as held:
            for number in range(300):
                one = held.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=30))
                one.sendall(b"G" * (number % 2))
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=30) as answer:
                assert answer.status == 200
            most = metrics_page.MOST_CONNECTIONS
            until(lambda: threading.active_count() - before <= most, "few threads")
        until(lambda: threading.active_count() <= before, "no threads")
        monkeypatch.setattr(metrics_page._Handler, "timeout", 0.2)
        with socket.create_connection(("127.0.0.1", page.port), timeout=30) as silent:
            assert silent.recv(1) == b""  # it is ended
    finally:
        page.close()


def test_prometheus_gets_its_numbers():
    from aedit.async_sgd.hub import hub_status
    from aedit.async_sgd.service import MetricsPage
    from aedit.launch.config import RunConfig
    from aedit.launch.hub.folder import make_hub

    hub = make_hub(RunConfig(), (0, 1))
    rest = {"merges": 3, "merge_s": 0.5, "journal": {"bytes": 7}, "standby": False, "servers": []}
    page = MetricsPage(lambda: hub_status(hub, 0.0) | rest, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        page.close()
    assert "aedit_merges_total 3.0" in text
    assert "aedit_journal_bytes 7.0" in text
