"""Tests that the dashboard for Grafana asks for metrics that a real hub exports, with their labels."""

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from kit.hub_processes import Client, HubProcess, ending, write_run
from kit.servers import Announcer
from test_hub_views import heartbeat_of
from test_rl_records import report_after

BOARD = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
TARGETS = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the labels of each metric of a hub with a learning node, a refused push and rollout servers."""
    folder = tmp_path_factory.mktemp("grafana")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ending():
        hub = HubProcess(write_run(folder), folder / "hub", f"--hub.metrics-port={port}")
        node = Client(hub.address, name="box").found()
        node.merged(0)
        assert not node.push(0, base=99).accepted
        beat = heartbeat_of(node)
        beat.loss = 2.0
        beat.rl.update(report_after(10))
        node.hub.heartbeat(beat)
        server = Announcer(hub.address)
        server.announce()
        server.accuse(node.who, server)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        node.hub.close()
    found = {}
    for name, labels in re.findall(r"^(aedit_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize(
    ("title", "target"), TARGETS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_panel_asks_for_what_a_hub_exports(exported, title, target):
    names = re.findall(r"aedit_\w+", target["expr"])
    assert names
    labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    labels |= {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
    }
    for name in names:
        assert name in exported
        assert labels <= exported[name]
        assert name.endswith("_total") == bool(re.search(rf"(rate|increase)\({name}\[", target["expr"]))


def test_the_dashboard_can_be_imported():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len({*ids}) == len(ids) == 24
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len({*places}) == len(places)
    (source,) = BOARD["templating"]["list"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {f"${{{source['name']}}}"}
