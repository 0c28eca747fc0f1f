"""Tests a whole run whose peers average by hivemind: real processes, of which one is killed."""

import os
import signal

import pytest
from kit.places import LIMIT_S, Place, ends_well
from kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOML = """
name = "x"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
source = "{directory}/text.txt"
seq_len = 32
held_out = 0.3
[train]
steps = 1000000
seconds = 100
batch_size = 2
eval_samples = 4
[edit]
every = 10
schedule = "seconds"
[outer]
lr = 0.7
momentum = 0.5
[checkpoint]
every = 1
[swarm]
discovery = "hivemind"
exchange = "hivemind"
averaging_s = 15.0
"""


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.end()


def met(place, node, since=0):
    """Return the rounds of a node in which others took part."""
    return [e for e in place.events(node)[since:] if e["event"] == "average"]


def last_round_began_s(place, node):
    """Return when the last round of a node began, by the clock of the day."""
    events = place.events(node)
    ended_s = (place.directory / "runs/x/nodes" / str(node) / "events.jsonl").stat().st_mtime
    last = next(e for e in reversed(events) if e["event"] in ("average", "average_failed"))
    return ended_s - (events[-1]["t"] - last["t"]) - last["seconds"]


def test_peers_average_go_on_when_one_is_killed_and_end_together(place):
    place.configure(TOML)
    run = place.aedit("run", place.toml, "--local", 3, f"--dir={place.directory}/runs")
    until(lambda: all(met(place, node) for node in range(3)), "a round of each", LIMIT_S)
    os.kill(place.node("local-1").pid, signal.SIGKILL)  # torchrun starts it again, from its checkpoint
    out = ends_well(run)
    assert "to other peers, by calculation" in out
    assert place.processes() == []
    for node in range(3):
        events = place.events(node)
        assert events[-1]["reason"] == "done"
        totals = next(e for e in reversed(events) if e["event"] == "averaging")
        assert totals["rounds"] > totals["failed"]
    again = next(i for i, e in enumerate(place.events(1)) if e["event"] == "start" and e["attempt"] == 2)
    assert met(place, 1, again)[0]["late"]
    assert abs(last_round_began_s(place, 0) - last_round_began_s(place, 2)) < 5
