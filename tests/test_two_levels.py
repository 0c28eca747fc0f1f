"""Tests two levels of hubs as real processes: one region's updates reach the other."""

import pytest
from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import PacedNode
from kit.waiting import until

from aedit.launch.hub import anchors_of

LIMIT_S = 60
NODE = PacedNode(hub="", name="", ledger="", units=2, numel=64, step_s=0.005, every=2)


@pytest.fixture
def field(tmp_path):
    """Yield a function that starts fields, which end with the test."""
    made = []

    def make(name, more="", **changes):
        directory = tmp_path / name
        directory.mkdir()
        made.append(Field(directory, NODE, more=more))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


def region(field, name, parent):
    one = field(name, more=f'parent = "{parent.plan.hub}"\nparent_every = 8\nparent_mix = 0.5')
    one.start_hub()
    return one


def versions(one):
    status = one.status()
    return [unit["version"] for unit in status["units"]] if status else []


def pushes(one):
    """Return the number of accepted pushes of each node, ascending; [] if there are not two nodes yet."""
    found = sorted(node["accepted"] for node in (one.status() or {"nodes": []})["nodes"])
    return found if len(found) == 2 else []


def test_what_one_region_learns_reaches_the_other(field):
    parent = field("parent")
    parent.start_hub()
    first, second = region(field, "first", parent), region(field, "second", parent)
    first.start_node("one-0", prefers=3)
    second.start_node("two-0", prefers=5)
    until(lambda: pushes(parent) >= [6, 6], "six pushes of both regions at the parent", LIMIT_S)
    names = [node["name"] for node in parent.status()["nodes"]]
    assert sorted(names) == sorted(
        f"hub-of-paced-at-{one.plan.hub.replace(':', '-')}" for one in (first, second)
    )
    assert set(first.end_nodes().values()) == set(second.end_nodes().values()) == {0}
    for one in (first, second, parent):
        one.end_hub()
    of_first, of_second = anchors_of(first.directory / "hub"), anchors_of(second.directory / "hub")
    for unit in range(NODE.units):
        assert of_first[unit][5] > 0, "the first region knows of the second one's steps"
        assert of_second[unit][3] > 0
        assert of_first[unit][3] > of_second[unit][3], "and of its own ones more"


def test_a_region_outlives_its_parent(field):
    parent = field("parent")
    parent.start_hub()
    one = region(field, "one", parent)
    one.start_node("one-0")
    until(lambda: min(versions(parent), default=0) >= 2, "the region to be heard", LIMIT_S)
    parent.kill_hub()
    before = min(versions(one))
    until(lambda: min(versions(one)) >= before + 30, "the region to go on alone", LIMIT_S)
    parent.start_hub()
    known = min(versions(parent))
    until(lambda: min(versions(parent)) >= known + 2, "the region to be heard again", LIMIT_S)
    assert one.nodes["one-0"].poll() is None
