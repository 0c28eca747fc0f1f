"""Tests how a node finds the hubs of a part: in its configuration, or in the file of its machine's peer."""

import pytest

from aedit.proto.agent import AgentPlan, replicas_of_parts
from aedit.proto.agent.membership import ReplicaFinder
from aedit.proto.swarm import PartPlaces, ReplicasFile
from aedit.types import UserError


def plan(**values):
    return AgentPlan(addresses=("a:1",), name="n", run="r", units=(), num_samples=1, **values)


@pytest.fixture
def file(tmp_path):
    return ReplicasFile(tmp_path / "replicas.json")


def test_standbys_of_the_configuration_are_asked_in_turn_and_the_former_hub_becomes_one():
    finder = ReplicaFinder(plan(standbys=("b:1", "c:1")), 0)
    assert [finder.others("a:1") for _ in range(4)] == [["b:1"], ["c:1"], ["b:1"], ["c:1"]]
    finder.adopt("b:1", "a:1")
    assert {*finder.others("b:1"), *finder.others("b:1")} == {"c:1", "a:1"}
    assert not finder.has_moved("b:1")


def test_without_a_standby_there_is_nobody_to_ask():
    assert ReplicaFinder(plan(), 0).others("a:1") == []


def test_all_replicas_in_the_file_are_asked_the_owner_first_then_the_one_that_should_lead(file):
    finder = ReplicaFinder(plan(replicas=str(file.path)), 0)
    file.write([PartPlaces(("d:1", "c:1", "b:1", "a:1"), "b:1", "c:1")])
    assert finder.has_moved("a:1")
    assert [finder.others("a:1") for _ in range(2)] == [["b:1", "c:1", "d:1"]] * 2
    finder.adopt("b:1", "a:1")
    assert not finder.has_moved("b:1")


def test_a_node_follows_a_part_to_replicas_that_it_did_not_know_when_it_joined(file):
    finder = ReplicaFinder(plan(replicas=str(file.path)), 0)
    file.write([PartPlaces(("a:1",), "a:1", "")])
    assert finder.others("a:1") == []
    file.write([PartPlaces(("x:9", "y:9"), "y:9", "")])
    assert finder.others("a:1") == ["y:9", "x:9"]


def test_while_nobody_owns_the_part_it_has_not_moved(file):
    file.write([PartPlaces(("a:1", "b:1"), "", "")])
    assert not ReplicaFinder(plan(replicas=str(file.path)), 0).has_moved("a:1")


def test_a_node_begins_with_the_owners_or_with_replicas_that_may_need_its_vote(file):
    file.write([PartPlaces(("a:1",), "a:1"), PartPlaces()])
    with pytest.raises(UserError, match="no replica of 1 was found within 0 s"):
        replicas_of_parts(file.path, 0.0)
    file.write([PartPlaces(("x:1", "a:1"), "a:1"), PartPlaces(("b:1", "c:1"), "")])
    assert replicas_of_parts(file.path, 0.0) == ["a:1", "b:1"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="no replica of any part was found"):
        replicas_of_parts(tmp_path / "replicas.json", 0.0)
