"""Tests that a replica which may be given up confirms nothing, so that its owner does not count on it."""

import json
import time
from contextlib import ExitStack

from kit.hub_processes import Client
from kit.waiting import until
from test_swarm_attacks import address, replica

from aedit.async_sgd.journal import moved_aside
from aedit.launch.config import SwarmConfig
from aedit.launch.records import resting_file
from aedit.launch.swarm import hosted_part
from aedit.launch.swarm.hosted_part import MARK, HostedPart, PeerOptions
from aedit.proto.rpc import HubUnreachable
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import PartPlaces


def told(process):
    return json.loads(Client(address(process)).hub.status(pb.StatusRequest()).json)


def followers(held, tmp_path, *names):
    """Return an owner and those that follow it. Without nodes it takes two more replicas, or none."""
    owner, file = held.enter_context(replica(tmp_path / "owner", 0, standby=False))
    found = [held.enter_context(replica(tmp_path / one, 0, address(owner)))[0] for one in names]
    file.write([PartPlaces(tuple(map(address, found)), address(owner)), PartPlaces()])
    return owner, *found


def test_the_owner_counts_on_a_replica_that_rests_only_once_it_confirms_again(tmp_path):
    (tmp_path / "second").mkdir()
    resting_file(tmp_path / "second").touch()
    with ExitStack() as held:
        _, first, second = followers(held, tmp_path, "first", "second")
        until(lambda: not told(second)["is_needed"], "a current journal")
        until(lambda: told(second)["unconfirmed_s"] > 3, "the second one to be silent")
        assert not told(first)["is_replica"]
        assert told(second)["other_replicas"] == 1
        resting_file(tmp_path / "second").unlink()
        until(lambda: told(second)["is_replica"], "the second one in sync")


def test_a_replica_on_which_the_journal_counts_does_not_rest(tmp_path):
    with ExitStack() as held:
        _, _, second = followers(held, tmp_path, "first", "second")
        until(lambda: told(second)["is_replica"], "the second one in sync")
        resting_file(tmp_path / "second").touch()
        for _ in range(8):
            assert told(second)["is_needed"]
            until(lambda: told(second)["unconfirmed_s"] < 0.4, "another confirmation")


def test_a_follower_without_an_owner_does_not_know_whether_it_is_needed(tmp_path):
    with ExitStack() as follower, ExitStack() as owner:
        leading, _ = owner.enter_context(replica(tmp_path / "owner", 0, standby=False))
        only, _ = follower.enter_context(replica(tmp_path / "only", 0, address(leading)))
        until(lambda: not told(only)["is_needed"], "a current journal")
        owner.close()
        until(lambda: told(only)["is_needed"], "the follower to have noticed")


class Process:
    """A hub that runs and does nothing, until it is told to end."""

    def __init__(self, *args, **options):
        self.has_ended = False

    def running(self):
        return not self.has_ended

    def terminate(self):
        self.has_ended = True

    kill = terminate


SWARM = SwarmConfig(discovery="file", listen="h:1", parts=2, copies=3, lease_s=6.0)


def hosted_by(options):
    return HostedPart(1, SWARM, options, None, founds=False)


def test_a_replica_that_does_not_answer_for_a_moment_stays_on_the_card_and_is_not_given_up(
    tmp_path, monkeypatch
):
    """Found: on a busy machine its status came late, so others took its place."""
    monkeypatch.setattr(hosted_part, "Child", Process)
    hosted = hosted_by(PeerOptions(directory=tmp_path, name="a"))
    now = [100.0]
    monkeypatch.setattr(hosted_part.time, "monotonic", lambda: now[0])
    status = {"term": 1, "follows": "h:1", "is_needed": False, "other_replicas": 3, "unconfirmed_s": 9.0}
    replies = [pb.StatusReply(json=json.dumps(status))]

    def answer(*_):
        if not replies:
            raise HubUnreachable("late")
        return replies.pop()

    hosted._client = type("Told", (), {"status": answer, "close": lambda _: None})()
    hosted.look()
    assert (hosted.state.term, hosted.others) == (1, 3)
    now[0] = 105.9
    hosted.look()
    assert hosted.state.term == 1
    assert hosted.others == 0, "what it said of the others may be over"
    now[0] = 106.1
    hosted.look()
    assert hosted.state is None
    monkeypatch.undo()
    hosted.stop()


def test_a_replica_has_rested_when_it_was_silent_for_longer_than_the_owner_counts_on_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(hosted_part, "Child", Process)
    options = PeerOptions(directory=tmp_path, name="a")
    hosted = hosted_by(options)
    resting, status = resting_file(options.folder(1)), {"term": 1, "follows": "h:1", "is_needed": False}

    def hears(silent_s):
        reply = pb.StatusReply(json=json.dumps(status | {"other_replicas": 3, "unconfirmed_s": silent_s}))
        hosted._client = type("Told", (), {"status": lambda *_: reply, "close": lambda _: None})()
        hosted.look()

    hears(5.5)
    assert hosted.others == 3
    assert not hosted.rest(True), "a confirmation may be on its way"
    assert resting.exists()
    monkeypatch.setattr(hosted_part, "_REST_S", 0.05)
    time.sleep(0.1)
    hears(0.01)
    assert not hosted.rest(True)
    hears(0.2)
    assert hosted.rest(True)
    assert not hosted.rest(False)
    assert not resting.exists()
    monkeypatch.setattr(hosted_part, "_REST_S", 5.0)
    assert not hosted.rest(True), "it has rested before, and not now"
    again = hosted_by(options)
    assert not resting.exists(), "what an earlier process of the peer was about to do is over"
    hosted.stop()
    again.stop()


def test_events_of_a_follower_have_the_age_of_the_run(tmp_path):
    """Found: they had the seconds since the machine was started."""
    with ExitStack() as held:
        _, first = followers(held, tmp_path, "first")
        until(lambda: not told(first)["is_needed"], "a current journal")
        first._standby.ask_for_votes()
        lines = (tmp_path / "first" / "events.jsonl").read_text().splitlines()
        (event,) = [event for line in lines if (event := json.loads(line))["event"] == "cannot_lead"]
        age_s = first._standby._mirror.hub.state.elapsed_s
        assert age_s <= event["t"] < age_s + 30


def test_a_replica_that_is_given_up_leaves_its_records_and_what_was_set_aside(tmp_path, monkeypatch):
    """Found: the whole peer ended, and again after each start, as what was set aside is a folder."""
    monkeypatch.setattr(hosted_part, "Child", Process)
    options = PeerOptions(directory=tmp_path, name="a")
    folder, hosted = options.folder(1), hosted_by(options)
    (folder / "set_aside" / "1").mkdir(parents=True)
    for name in (MARK, "journal-00000001", "metrics.jsonl", "set_aside/1/journal-00000001"):
        (folder / name).write_text("x")

    def left():
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    hosted.retire()
    assert left() == ["metrics.jsonl", "set_aside/1/journal-00000001"]
    hosted_by(options).stop()
    assert left() == ["metrics.jsonl", "set_aside/1/journal-00000001"], "it is kept anew"
    assert [one["bytes"] for one in moved_aside(folder)] == [1]
