"""Tests a standby: it mirrors its primary and takes over on the nodes' request, and a run has one leader."""

import shutil
import threading
import time
import zlib
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest
from kit.full_disk import limit_files
from kit.hub_processes import Client, HubProcess, HubRefused, HubUnreachable, ending, hello, status, write_run
from kit.waiting import until

from aedit.async_sgd.journal import Damaged, Journal, Store, batches
from aedit.async_sgd.journal.encoding import encode_records
from aedit.async_sgd.replication import Mirror
from aedit.async_sgd.rules import records
from aedit.launch.config import RunConfig
from aedit.launch.hub import anchors_of
from aedit.launch.hub.folder import make_hub, pushes_of
from aedit.launch.records.hub_records import HubSample
from aedit.launch.views.sources import HubSource
from aedit.launch.views.tables import hub_table
from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import HubClient
from aedit.proto.rpc import hub_pb2 as pb

STANDBY = 'standby = "127.0.0.1:0"'


def pair(tmp_path, more=STANDBY, **values):
    toml = write_run(tmp_path, more, **values)
    primary = HubProcess(toml, tmp_path / "run" / "hub")
    standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
    return toml, primary, standby


def kept(directory):
    """Return node, unit and number of the pushes in the journal of a folder."""
    return {(push.node, push.unit, push.seq) for push in pushes_of(directory)}


def attached(node, electors=1):
    """Wait until the hub waits for its standby, and as many nodes break ties between them."""
    until(lambda: (node.status()["standby"], node.status()["electors"]) == (True, electors), "the standby")


def elected(address, *nodes):
    """Let nodes vote for a hub until it leads, and agree to its first configuration."""
    until(lambda: {node.vote(address).leads for node in nodes} == {True}, "the election")


@contextmanager
def voting(*nodes):
    """Let nodes offer their votes to their hub, as agents do when it does not answer."""
    over = threading.Event()

    def vote(node):
        while not over.wait(0.1):
            with suppress(HubUnreachable, HubRefused):
                node.vote(node.address)

    threads = [threading.Thread(target=vote, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_standby_takes_over_with_the_same_bits_and_the_old_hub_does_not_lead_again(tmp_path):
    toml, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        other = Client(primary.address, "other")
        other.join()
        attached(node, electors=2)
        for _ in range(3):
            node.merged(0)
            other.merged(1)
        before = [node.anchor(unit) for unit in range(2)]
        assert status(standby.address)["follows"] == primary.address
        source = HubSource(standby.address)
        shown = "\n".join(map(str, hub_table(source.poll().hubs[0].lines[-1])))
        source.close()
        assert f"follows the hub at {primary.address}" in shown
        primary.kill()

        assert not node.vote(standby.address).leads  # one of two is not more than half
        elected(standby.address, node, other)
        assert hello(standby.address).term == 2

        node.go_to(standby.address)
        after = [node.anchor(unit) for unit in range(2)]
        for (v, values), (w, again) in zip(before, after, strict=True):
            assert v == w
            assert np.array_equal(values, again)
        node.merged(0)
        assert node.heartbeat().elapsed_s < 120  # elapsed time of the run, not of the machine

        old = HubProcess(toml, tmp_path / "run" / "hub")
        assert old.process.wait(60) == 2
        assert "leads this run under the newer term 2" in old.log.read_text()
        assert standby.stop() == 0
    assert kept(tmp_path / "run" / "standby") >= {*node.accepted, *other.accepted}


def test_a_node_that_has_found_its_hub_again_has_no_vote_any_more(tmp_path):
    _, primary, standby = pair(tmp_path, expire_s=4.0)
    with ending():
        node, other = Client(primary.address).found(), Client(primary.address, "other")
        other.join()
        attached(node, electors=2)
        assert not node.vote(standby.address).leads
        found_again_s = time.monotonic()
        while time.monotonic() - found_again_s < 5.0:
            node.heartbeat(), other.heartbeat()
            time.sleep(0.1)
        assert not other.vote(standby.address).leads
        elected(standby.address, node, other)


def test_six_invented_names_do_not_depose_a_healthy_hub(tmp_path):
    """Neither names that never joined have a vote, nor one member under many identities."""
    _, primary, standby = pair(tmp_path)
    with ending():
        nodes = [Client(primary.address, name) for name in ("one", "two", "three")]
        nodes[0].found()
        for node in nodes[1:]:
            node.join()
        attached(nodes[0], electors=3)
        for k in range(6):
            invented = Client(primary.address, f"invented-{k}")
            invented.who.node = k % 3
            with pytest.raises(HubRefused):
                invented.vote(standby.address)
        for _ in range(6):
            nodes[2].elector = Elector(None)
            assert not nodes[2].vote(standby.address).leads
        assert nodes[0].merged(0).verdict == pb.MERGED
        assert nodes[0].heartbeat().term == 1
        assert primary.process.poll() is None


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
        assert kept(tmp_path / "run" / "standby") == set(node.accepted)
        mine, theirs = anchors_of(tmp_path / "run" / "hub"), anchors_of(tmp_path / "run" / "standby")
        assert np.array_equal(mine[1], theirs[1])


def test_a_hub_that_was_cut_off_is_told_that_it_is_over_and_ends(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        node.elect(standby.address)  # the primary is alive, and the only node cannot reach it
        assert primary.process.wait(60) == 2
        assert "another hub leads this run" in primary.log.read_text()
        assert node.go_to(standby.address).term == 2


def test_without_another_hub_nobody_can_know_of_a_higher_term(tmp_path):
    hub = HubProcess(write_run(tmp_path), tmp_path / "run" / "hub")
    with ending():
        node = Client(hub.address).found()
        node.who.term = 2
        with pytest.raises(HubRefused) as refused:
            node.heartbeat()
        assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        node.who.term = 1
        assert node.heartbeat().term == 1


def test_a_silent_standby_is_waited_for_no_longer(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        standby.kill()
        with voting(node):
            assert node.push(0).accepted
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
        node.elect(standby.address)
        node.go_to(standby.address)
        old = HubProcess(toml, tmp_path / "run" / "hub", "--standby", "--address", place)
        with ending():
            attached(node)
            node.merged(0)
            standby.kill()
            node.elect(old.address)
            assert node.vote(old.address).term == 3
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
            node.elect(standby.address)
            node.go_to(standby.address)
            again, other = node.anchor(0)
            assert version == again
            assert np.array_equal(values, other)


def test_a_standby_that_has_begun_nothing_yet_does_not_go_on_in_the_middle(tmp_path):
    """Its own empty segment begins with another mark than the primary's."""
    Store(tmp_path).recover(make_hub(RunConfig(), (0, 1)))
    mirror = Mirror(Store(tmp_path), lambda: make_hub(RunConfig(), (0, 1)))
    assert mirror.position == (1, 0)


def test_a_mirror_has_what_was_decided_as_soon_as_it_is_whole(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    journal = Journal(tmp_path / "a", 1, fsync=True)
    for term in (1, 2, 3):
        journal.append(encode_records([records.Led(term)]))
    data = journal.file.read(0, journal.position[1])
    mirror = Mirror(Store(tmp_path / "b"), lambda: make_hub(RunConfig(), (0, 1)))
    terms = []
    for at in range(len(data)):
        byte = data[at : at + 1]
        mirror.take(pb.TailChunk(segment=1, offset=at, data=byte, crc=zlib.crc32(byte)))
        while mirror.apply():
            terms.append((at + 1, mirror.hub.state.term))
    ends = [end for _, end in batches(journal.file)]
    assert terms == list(zip(ends, (1, 2, 3), strict=True))
    with pytest.raises(Damaged, match="goes on at"):
        mirror.take(pb.TailChunk(segment=1, offset=len(data) + 1, data=b"x", crc=zlib.crc32(b"x")))
    with pytest.raises(Damaged, match="on its way"):
        mirror.take(pb.TailChunk(segment=1, offset=len(data), data=b"x", crc=7))
    again = mirror.journal()
    again.append(encode_records([records.Led(4)]))
    hub = make_hub(RunConfig(), (0, 1))
    Store(tmp_path / "b").recover(hub)
    assert hub.state.term == 4


def test_a_standby_that_is_elected_on_a_full_disk_follows_on_and_leads_once_there_is_room(tmp_path):
    """Found: it neither led nor followed until it was started again, and refused every other hub."""
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        node.merged(0)
        primary.kill()
        limit_files(standby.process, 8192)  # room for its vote, and not for the end of its journal

        def refused():
            with suppress(HubRefused, HubUnreachable):
                assert not node.vote(standby.address).leads
            return len(standby.events("cannot_lead")) >= 2

        until(refused, "two elections that fail")
        assert "follows" in status(standby.address)
        assert "no space" in standby.log.read_text()
        assert "Traceback" not in standby.log.read_text()
        limit_files(standby.process)
        node.elect(standby.address)
        assert node.go_to(standby.address).term > 2
        node.merged(0)
        assert standby.stop() == 0
    assert kept(standby.directory) == set(node.accepted)


def test_a_leader_with_a_full_disk_gives_way_to_a_standby_with_room_and_follows_it(tmp_path):
    """Found: it led on while nothing could be acknowledged, for as long as the disk was full."""
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        node.merged(0)
        limit_files(primary.process, 0)
        with node.impatient(), suppress(HubRefused, HubUnreachable):
            node.push(1)

        def leads():
            with suppress(HubRefused, HubUnreachable):
                return node.vote(standby.address).leads

        until(leads, "the election of the standby")
        assert node.go_to(standby.address).term == 2
        node.merged(0)
        until(lambda: status(primary.address).get("disk_full"), "the former leader to follow")
        node.merged(1)
        limit_files(primary.process)
        attached(node)
        node.merged(0)
        assert status(primary.address)["follows"] == standby.address
        assert status(primary.address)["disk_full"] == ""
        assert "Traceback" not in primary.log.read_text()
        assert (primary.stop(), standby.stop()) == (0, 0)
        assert kept(primary.directory) == kept(standby.directory) == set(node.accepted)


def test_a_leader_with_a_full_disk_and_no_standby_in_sync_leads_on_once_there_is_room(tmp_path):
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        standby.kill()
        with voting(node):
            until(lambda: node.status()["in_sync"] == 0, "the hub to go on alone")
        limit_files(primary.process, 0)
        with node.impatient(), pytest.raises(HubUnreachable):
            node.push(1)
        limit_files(primary.process)
        node.seqs[1] -= 1
        node.merged(1)
        assert node.heartbeat().term == 1
        assert not primary.events("resign")


def test_a_standby_with_a_full_disk_is_not_waited_for_and_comes_back_once_there_is_room(tmp_path):
    """Found: its process ended with a traceback, and was not back when there was room."""
    _, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        limit_files(standby.process, 0)
        with voting(node):
            assert node.push(0).accepted
        until(lambda: node.status()["in_sync"] == 0, "the hub to go on alone")
        assert (
            "no space" in status(standby.address)["disk_full"]
            or "too large" in status(standby.address)["disk_full"]
        )
        node.merged(1)
        limit_files(standby.process)
        attached(node)
        node.merged(0)
        assert standby.process.poll() is None
        assert "Traceback" not in standby.log.read_text()
        standby.kill()
    assert kept(standby.directory) == set(node.accepted)


def with_older_copy(toml, primary, tmp_path):
    """Found a run, copy the folder of its hub, and let it go on, and end; return node and newest anchor."""
    node = Client(primary.address).found()
    attached(node)
    node.merged(0)
    primary.kill()
    shutil.copytree(primary.directory, tmp_path / "older")
    primary = HubProcess(toml, primary.directory)
    until(lambda: primary.events("lead")[-1]["term"] == 2, "its election by the standby")
    node.go_to(primary.address)
    attached(node)
    for _ in range(3):
        node.merged(1)
    anchor = node.anchor(1)
    primary.kill()
    return node, anchor


def with_copy(toml, primary, tmp_path, *options):
    """Put that copy back, and return the hub that begins with it."""
    shutil.rmtree(primary.directory)
    shutil.copytree(tmp_path / "older", primary.directory)
    return HubProcess(toml, primary.directory, *options)


def go_on_at(standby, node, primary):
    """Let the standby lead and the primary follow it; no acknowledged push is lost on either disk."""
    node.elect(standby.address)
    assert node.go_to(standby.address).term > 2
    anchor = node.anchor(1)
    attached(node)
    node.merged(0)
    assert not status(primary.address)["set_aside"]
    assert (primary.stop(), standby.stop()) == (0, 0)
    assert kept(primary.directory) == kept(standby.directory) == set(node.accepted)
    return anchor


def test_an_older_copy_of_a_hubs_folder_does_not_cost_what_its_standby_has(tmp_path):
    """Found: the hub led on under its term, and the standby deleted what the older copy did not have."""
    toml, primary, standby = pair(tmp_path)
    with ending():
        node, (version, values) = with_older_copy(toml, primary, tmp_path)
        primary = with_copy(toml, primary, tmp_path)
        assert "this hub follows until it has the rest" in primary.log.read_text()
        assert primary.events("behind")
        reply = node.vote(primary.address)
        assert not reply.leads
        assert not reply.HasField("asks"), "it does not stand with less"
        again, others = go_on_at(standby, node, primary)
        assert again == version
        assert np.array_equal(others, values)


def test_an_older_copy_does_not_lead_while_no_standby_says_how_much_it_has(tmp_path):
    """Found: it led on under its term, and its standby set aside what was acknowledged."""
    toml, primary, standby = pair(tmp_path)
    with ending():
        node, _ = with_older_copy(toml, primary, tmp_path)
        standby.kill()
        primary = with_copy(toml, primary, tmp_path)
        assert "may be an older copy" in primary.events("must_be_elected")[0]["reason"]
        standby = HubProcess(toml, standby.directory, "--standby")
        go_on_at(standby, node, primary)


def test_a_hub_that_starts_before_its_standby_leads_once_that_is_there(tmp_path):
    """No node is alive that could offer its vote."""
    toml, primary, standby = pair(tmp_path)
    with ending():
        node = Client(primary.address).found()
        attached(node)
        primary.kill()
        standby.kill()
        primary = HubProcess(toml, primary.directory)
        assert primary.events("must_be_elected")
        standby = HubProcess(toml, standby.directory, "--standby")
        until(lambda: primary.events("lead")[-1]["term"] == 2, "the election")
        assert node.go_to(primary.address).term == 2
        attached(node)
        node.merged(0)


def test_a_standby_sets_aside_what_its_leader_lacks_and_says_so(tmp_path):
    """An operator lets the older copy lead while the standby does not answer."""
    toml, primary, standby = pair(tmp_path)
    with ending():
        node, _ = with_older_copy(toml, primary, tmp_path)
        standby.kill()
        with_copy(toml, primary, tmp_path, "--force-lead")
        standby = HubProcess(toml, standby.directory, "--standby")
        (aside,) = until(lambda: status(standby.address)["set_aside"], "the records to be set aside")
        assert aside["path"] == str(standby.directory / "set_aside" / "1")
        assert aside["bytes"] > 2000, "at least three pushes"
        shown = str(next(hub_table(HubSample.of(status(standby.address)))))
        assert f"set aside: {aside['path']} ({aside['bytes']} bytes)" in shown
        standby.kill()
        (tail,) = (standby.directory / "set_aside" / "1").glob("journal-*.from-*")
        place = tmp_path / "restored"
        place.mkdir()
        name, _, start = tail.name.partition(".from-")
        (place / name).write_bytes((standby.directory / name).read_bytes()[: int(start)] + tail.read_bytes())
        for name in ("run.toml", "part.json"):
            shutil.copy(standby.directory / name, place)
    assert kept(place) == set(node.accepted)
