"""Tests what a hub remembers of members that have left: bounded in memory, in lines and in a status."""

import json

import pytest
from kit.hub_machine import picture, through_a_file, world

from aedit.async_sgd.hub import CERTIFIED, Member, state
from aedit.async_sgd.hub.decide_join import Denied
from aedit.async_sgd.hub.status import MOST_GONE, MOST_SHOWN, hub_status
from aedit.async_sgd.rules import Left
from aedit.launch.hub.leading import Reports, metrics
from aedit.launch.records import HubSample
from aedit.launch.views.tables import hub_table
from aedit.proto.rpc import MESSAGE_BYTES


@pytest.fixture
def kept(monkeypatch):
    """Return the number of departed members that the hub remembers in the test."""
    monkeypatch.setattr(state, "KEPT_MEMBERS", 5)
    return 5


def come_and_go(made, count, prefix="guest"):
    for i in range(count):
        node = made.join(f"{prefix}{i}")
        made.do(made.hub.leave(node))


def test_names_that_come_and_go_do_not_grow_the_state(kept):
    made = world(2)
    come_and_go(made, 300)
    state = made.hub.state
    assert len(state.members) <= 2 + kept + 1
    assert set(state.names) == {"node0", "node1", *(f"guest{i}" for i in range(295, 300))}
    assert len(json.dumps(made.hub.saved()[0])) < 10_000
    assert all(len(unit.brought) <= 2 + kept for unit in state.units.values())


def test_who_comes_back_in_time_goes_on_with_its_own_count_and_who_comes_later_starts_anew(kept):
    made = world(2)
    made.push(1, 1.0)
    made.settle()
    made.do(made.hub.leave(1))
    come_and_go(made, kept - 1)
    assert made.join("node1") == 1
    assert made.hub.state.members[1].received == {0: 1}
    made.do(made.hub.leave(1))
    come_and_go(made, kept, "later")
    node = made.join("node1")
    assert made.hub.state.members[node].received == {}


def test_a_member_whose_push_waits_is_remembered(kept):
    made = world(3, quorum="all")
    made.push(1, 1.0)
    made.do(made.hub.leave(1))
    come_and_go(made, 20)
    assert "node1" in made.hub.state.names
    made.push(0, 1.0)
    made.push(2, 1.0)
    made.settle()
    assert made.hub.state.units[0].version == 2


def test_a_replay_and_a_snapshot_forget_the_same_members(kept):
    made = world(2)
    come_and_go(made, 9)
    made.join("guest7")
    saved, at = through_a_file(made.hub.saved()), len(made.journal)
    come_and_go(made, 12, "later")
    assert picture(made.replayed()) == picture(made.hub) == picture(made.replayed(saved, at))


def exclude(made, name, **keys):
    """Let a node join and be excluded."""
    node = made.join(name, **keys)
    made.do([Left(node, "excluded by the test", excluded=True)])


def test_excluded_names_are_bounded_but_for_those_with_keys_of_their_own(kept):
    """Found: excluded members were kept without limit."""
    made = world(2)
    for i in range(5):
        exclude(made, f"named{i}", proof=CERTIFIED, origin=f"keys of named{i}")
    for i in range(100):
        exclude(made, f"bad{i}", origin=f"10.0.0.{i}")
    assert len(made.hub.state.members) <= 2 + 5 + kept + 1
    for i in (95, 99):  # the latest are remembered, and their hosts
        for name in (f"bad{i}", f"other{i}"):
            with pytest.raises(Denied, match="excluded"):
                made.join(name, origin=f"10.0.0.{i}")
    with pytest.raises(Denied, match="excluded"):
        made.join("named0", proof=CERTIFIED, origin="keys of named0")
    made.join("bad0", origin="10.0.0.0")


def test_a_replay_and_a_snapshot_forget_the_same_excluded_members(kept):
    made = world(2)
    for i in range(9):
        exclude(made, f"bad{i}", origin=f"10.0.0.{i}")
    saved, at = through_a_file(made.hub.saved()), len(made.journal)
    for i in range(9, 20):
        exclude(made, f"bad{i}", origin=f"10.0.0.{i}")
    assert picture(made.replayed()) == picture(made.hub) == picture(made.replayed(saved, at))


def test_a_free_index_is_no_way_around_the_limit_of_names_per_origin(kept):
    made = world(1)
    come_and_go(made, kept + 3)
    assert made.hub.state.free
    made.join("one", origin="10.0.0.9", most_names=1)
    with pytest.raises(Denied, match="has taken 1 names"):
        made.join("two", origin="10.0.0.9", most_names=1)


def test_lines_and_status_of_a_run_with_5000_names_are_bounded(tmp_path):
    made = world(2)
    come_and_go(made, 5000, "x" * 120)
    now = hub_status(made.hub, made.now)
    assert len(now["nodes"]) == 2 + MOST_GONE
    assert now["nodes_left_out"] == state.KEPT_MEMBERS - MOST_GONE
    assert [node["name"] for node in now["nodes"]][-1].endswith("4999")
    overview = now | {
        "journal": {"bytes": 0, "past_bytes": 0},
        "merges": 0,
        "merge_s": 0.0,
        "standby": False,
        "servers": [],
    }
    line = metrics(overview)
    assert len(json.dumps(line)) < 40_000
    for shown in (line | {"t": 0.0}, now):
        tables = " ".join(str(part) for part in hub_table(HubSample.of(shown)))
        assert f"the hub knows {state.KEPT_MEMBERS - MOST_GONE:,} other nodes" in tables


def test_a_full_status_fits_into_one_message(tmp_path):
    made = world(1)
    for i in range(MOST_SHOWN + 50):
        made.hub.state.members.append(Member(f"{i:0120}", i + 1, live=True))
    made.hub.state.index()
    now = hub_status(made.hub, made.now)
    assert len(now["nodes"]) == MOST_SHOWN
    reports = Reports(tmp_path)
    reports.start(0.0)
    for i in range(300):
        reports.event("accused", number=i, evidence="e" * 4000)
        reports.line({"number": i, "nodes": "n" * 5000})
    text = reports.status(now, 0)
    reports.close()
    assert len(text) <= MESSAGE_BYTES
    found = json.loads(text)
    assert [event["number"] for event in found["events"]][-1] == 299
    assert found["lines"][-1]["number"] == 299
    assert found["num_lines"] == 300
