"""Tests what the node of a machine tells its peer: model and speed, which go onto the card."""

import json
import os

import pytest
from kit.agents import MemoryHub, node, plan
from kit.waiting import until

from aedit.proto.agent.agent import NodeStateFile
from aedit.proto.swarm import NODE, NodeState, read_node, write_node
from aedit.types import Layout, model_sha256

STATE = NodeState("ab" * 32, 2.5)


def test_the_file_tells_what_was_written_until_it_is_half_a_minute_old(tmp_path):
    now = [1000.0]

    def state():
        return read_node(tmp_path / NODE, clock=lambda: now[0])

    assert state() == NodeState()
    write_node(tmp_path / NODE, STATE)
    os.utime(tmp_path / NODE, (1000.0, 1000.0))
    now[0] = 1029.0
    assert state() == STATE
    now[0] = 1031.0
    assert state() == NodeState(), "the node is gone, or stopped"


@pytest.mark.parametrize("speed", ["NaN", "Infinity", "-1.0", "1e300"])
def test_a_speed_that_no_card_can_have_is_unknown(tmp_path, speed):
    (tmp_path / NODE).write_text('{"model": "abcdef12", "steps_per_s": ' + speed + "}")
    assert read_node(tmp_path / NODE) == NodeState("abcdef12", 0.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "ab"}', '{"model": "", "steps_per_s": null}'])
def test_another_file_tells_nothing(tmp_path, text):
    (tmp_path / NODE).write_text(text)
    assert read_node(tmp_path / NODE) == NodeState()


@pytest.mark.parametrize("model", ["x" * 16, "ab", "AB" * 32, "ab" * 33])
def test_a_model_that_no_card_can_have_is_unknown(tmp_path, model):
    write_node(tmp_path / NODE, NodeState(model, 1.0))
    assert read_node(tmp_path / NODE) == NodeState("", 1.0)


def test_a_node_writes_its_speed_at_most_every_five_seconds(tmp_path):
    now = [0.0]
    made = plan(["h:1"], replicas=str(tmp_path / "replicas.json"), facts=(("seed", "0"),))
    report = NodeStateFile(made, clock=lambda: now[0])
    wanted = model_sha256(Layout(made.units), made.facts, made.num_samples)
    for at_s, speed, shown in [(0.0, 1.0, 1.0), (4.9, 2.0, 1.0), (5.1, 3.0, 3.0)]:
        now[0] = at_s
        report.tell(speed)
        assert read_node(tmp_path / NODE) == NodeState(wanted, shown)


def test_a_folder_that_cannot_be_written_ends_no_node(tmp_path, caplog):
    NodeStateFile(plan(["h:1"], replicas=str(tmp_path / "gone" / "replicas.json"))).tell(1.0)
    assert "the peer does not know what this node trains" in caplog.text


@pytest.mark.parametrize("swarm", [True, False])
def test_the_agent_of_a_node_in_a_swarm_writes_the_file(tmp_path, swarm):
    hub = MemoryHub()
    replicas = tmp_path / "replicas.json"
    replicas.write_text(json.dumps({"parts": [], "shut_out": []}))
    made = plan([hub.serve()], replicas=str(replicas) if swarm else "")
    with node(made) as link:
        link.join(10.0)
        if swarm:
            model = model_sha256(Layout(made.units), made.facts, made.num_samples)
            until(lambda: read_node(tmp_path / NODE).model == model, "the model in the file")
    assert (tmp_path / NODE).exists() == swarm
    hub.kill()
