"""Tests the views of a swarm: the answer of a peer, and the tables of peers and parts."""

import json
from hashlib import sha256
from types import SimpleNamespace

import pytest
from kit.leading_hub import leading_hub
from rich.console import Console

from aedit.launch.records import SwarmSample
from aedit.launch.views import sources
from aedit.launch.views.panel import panel
from aedit.proto.rpc import last_term_before

PEERS = [
    {
        "name": "alpha",
        "address": "a:1",
        "role": "trains, keeps parts",
        "owns": [0],
        "keeps": [1],
        "steps_per_s": 2.5,
        "model": "0123456789abcdef",
        "state": "",
    },
    {"name": "[bold]beta", "address": "", "owns": [], "keeps": [], "state": "leaving"},
]


def part(**values):
    units = [{"unit": 0, "name": "u", "version": 7, "pending": 1, "usual_s": None, "norm": 0.0}]
    node = {"node": 0, "name": "alpha", "state": "training", "steps": 30, "steps_per_s": 1.5}
    status = {"term": 3, "elapsed_s": 65.0, "progress": 0.5, "nodes": [node], "units": units}
    traffic = {"bytes_in": 2000, "bytes_out": 3000, "digest": "0123abcd" * 8}
    status |= {"owner": "a:9", "in_sync": 2, "journal": {"bytes": 100, "past_bytes": 0}, "traffic": traffic}
    return status | values


@pytest.fixture
def shown(monkeypatch):
    """Return a function that shows what a peer says."""

    def show(said, poll="poll"):
        client = SimpleNamespace(status=lambda request: SimpleNamespace(json=json.dumps(said)))
        monkeypatch.setattr(sources, "HubClient", lambda *args, **values: client)
        run = getattr(sources.HubSource("127.0.0.1:1"), poll)()
        console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(panel(run, run.indices))
        return run, console.export_text()

    return show


def test_a_peer_shows_nodes_peers_and_parts(shown):
    run, text = shown({"run": "r", "peers": PEERS, "parts": [part(), None]})
    rows = [line.strip("\u2502 ").split() for line in text.splitlines()]
    assert ["alpha", "a:1", "trains,", "keeps", "0", "1", "2.50", "01234567"] in rows
    assert ["[bold]beta", "client", "-", "-", "-", "-", "leaving"] in rows
    sizes = ["2.0", "kB", "3.0", "kB"]
    assert ["0", "a:9", "3", "2", "7", "0123abcd", "1", *sizes] in rows
    assert ["1", "none", "that", "answers", *["-"] * 7] in rows
    assert run.hubs[0].last.progress == 0.5


def test_a_part_that_is_lost_or_was_founded_again_says_so(shown):
    again, lost = "was lost; founded again by alpha, generation 1", "no owner for 12 s"
    parts = [part() | {"term": last_term_before(1, b"founder") + 4}, None]
    _, text = shown({"run": "r", "peers": PEERS, "parts": parts, "troubles": [again, lost]})
    assert f"part 0: {again}" in text
    assert f"part 1: {lost}" in text
    assert " 1:4 " in text


def test_without_any_owner_the_peers_are_shown(shown):
    run, text = shown({"run": "r", "peers": PEERS[:1], "parts": [None]})
    assert run.hubs == ()
    assert "none that answers" in text


def test_the_history_is_that_of_the_first_part_whose_owner_answers(shown):
    lines = [{"t": float(t), "term": 1, "progress": t / 4, "nodes": [], "versions": [t]} for t in range(3)]
    run, _ = shown({"run": "r", "peers": PEERS, "parts": [None, part(lines=lines)]}, "history")
    assert [line.progress for line in run.hubs[0].lines] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("said", [{"peers": [{}], "parts": []}, {"peers": [], "parts": [{"term": 1}]}])
def test_an_answer_of_another_form_is_not_a_swarm(said):
    with pytest.raises((KeyError, TypeError)):
        SwarmSample.of(said)


def test_an_owner_tells_the_bytes_that_went_in_and_out_and_a_digest_of_the_anchors_it_gave(tmp_path):
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        told = node.status()["traffic"]
        assert told == {"bytes_in": 4 * sum(node.numels), "bytes_out": 0, "digest": ""}
        lines, sent = "", 0
        for unit in (1, 0):
            version, values = node.anchor(unit)
            lines = f"{unit} {version} {sha256(values.tobytes()).hexdigest()}\n" + lines
            sent += values.nbytes
            digest = "" if unit else sha256(lines.encode()).hexdigest()
            told = node.status()["traffic"]
            assert (told["bytes_out"], told["digest"]) == (sent, digest)
