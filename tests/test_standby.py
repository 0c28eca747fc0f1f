"""A standby has what its primary has, takes over when the nodes ask, and no run has two heads."""

import time

import grpc
import numpy as np
import pytest
from hub_processes import Client, HubProcess, HubRefused, ending, hello, until, write_run

from aedit.launch.hub.replay import anchors_of, pushes_of
from aedit.proto import hub_pb2 as pb
from aedit.proto.client import HubClient

STANDBY = 'standby = "127.0.0.1:0"'


def pair(tmp_path, more=STANDBY, **values):
    toml = write_run(tmp_path, more, **values)
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
    return toml, primary, standby


def attached(node):
    until(lambda: node.status()["standby"], "the standby")


def test_a_standby_takes_over_with_the_same_bits_and_the_old_hub_does_not_lead_again(tmp_path):
    toml, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        other = Client(primary.address, "other")
        other.join()
        attached(node)
        for _ in range(3):
            node.merged(0)
            other.merged(1)
        before = [node.anchor(unit) for unit in range(2)]
        primary.kill()

        assert not node.vote(standby.address).leads  # one of two is not more than half
        reply = other.vote(standby.address)
        assert (reply.leads, reply.term) == (True, 2)
        assert node.vote(standby.address).leads

        node.go_to(standby.address)
        after = [node.anchor(unit) for unit in range(2)]
        for (v, values), (w, again) in zip(before, after, strict=True):
            assert v == w
            assert np.array_equal(values, again)
        node.merged(0)

        old = HubProcess(toml, tmp_path / "run" / "hub")
        assert old.process.wait(20) == 2
        assert "leads this run by now, under term 2" in old.log.read_text()
        assert standby.stop() == 0
    accepted = {(push.node, push.unit, push.seq) for push in pushes_of(tmp_path / "run" / "standby")}
    assert accepted >= {*node.accepted, *other.accepted}


def test_an_accepted_push_is_on_the_standbys_disk_before_it_is_acknowledged(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        for _ in range(5):
            node.merged(1)
        node.push(0)
        primary.kill()
        standby.kill()
        kept = {(push.node, push.unit, push.seq) for push in pushes_of(tmp_path / "run" / "standby")}
        assert kept == set(node.accepted)
        mine, theirs = anchors_of(tmp_path / "run" / "hub"), anchors_of(tmp_path / "run" / "standby")
        assert np.array_equal(mine[1], theirs[1])


def test_a_hub_that_was_cut_off_is_told_that_it_is_over_and_ends(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        assert node.vote(standby.address).leads  # the primary is alive, and the only node cannot reach it
        assert primary.process.wait(20) == 2
        assert "another hub leads this run" in primary.log.read_text()
        assert node.go_to(standby.address).term == 2


def test_a_hub_believes_whoever_has_seen_a_higher_term(tmp_path):
    toml = write_run(tmp_path, STANDBY)
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    with ending():
        node = Client(primary.address).found()
        node.who.term = 2
        with pytest.raises(HubRefused) as refused:
            node.beat()
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
        assert primary.process.wait(20) == 2


def test_without_another_hub_nobody_can_know_of_a_higher_term(tmp_path):
    hub = HubProcess(write_run(tmp_path), tmp_path / "run" / "hub")
    with ending():
        node = Client(hub.address).found()
        node.who.term = 2
        with pytest.raises(HubRefused) as refused:
            node.beat()
        assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        node.who.term = 1
        assert node.beat().term == 1


def test_a_silent_standby_is_waited_for_no_longer(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        standby.kill()
        began = time.monotonic()
        assert node.push(0).accepted
        assert time.monotonic() - began < 10
        until(lambda: primary.events("standby_lost"), "the event")
        standby = HubProcess(tmp_path / "run.toml", tmp_path / "run" / "standby", "--standby")
        with ending():
            attached(node)


def test_a_standby_refuses_what_only_the_hub_that_leads_may_answer(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        assert hello(standby.address).run == "run"
        other = Client(standby.address)
        with pytest.raises(HubRefused) as refused:
            other.join()
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
        client = HubClient(standby.address, call_timeout_s=5.0)
        with pytest.raises(HubRefused) as refused:
            client.take_over(pb.TakeOverRequest(who=pb.Who(run="run", node=0, session=99)))
        assert refused.value.code == grpc.StatusCode.ABORTED
        client.close()


def test_the_old_hub_may_follow_the_new_one(tmp_path):
    toml, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        node.merged(0)
        place = primary.address
        primary.kill()
        assert node.vote(standby.address).leads
        node.go_to(standby.address)
        old = HubProcess(toml, tmp_path / "run" / "hub", "--standby", "--address", place)
        with ending():
            attached(node)
            node.merged(0)
            standby.kill()
            reply = node.vote(old.address)
            assert (reply.leads, reply.term) == (True, 3)
            node.go_to(old.address)
            node.merged(0)


def test_a_standby_that_comes_late_gets_a_snapshot_first(tmp_path):
    more = STANDBY
    toml = write_run(tmp_path, more, snapshot_bytes=2**20)
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    with ending():
        node = Client(primary.address, numels=(90_000, 70)).found()
        for _ in range(16):
            node.merged(0)
        until(lambda: len(primary.events("snapshot")) >= 2, "two snapshots")
        standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
        with ending():
            attached(node)
            for _ in range(12):  # on through segments that end meanwhile
                node.merged(0)
            version, values = node.anchor(0)
            primary.kill()
            assert node.vote(standby.address).leads
            node.go_to(standby.address)
            again, other = node.anchor(0)
            assert version == again
            assert np.array_equal(values, other)
