"""Tests alerts: when they begin and end, where they are recorded and sent, and what is kept secret."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf, nan

import pytest
from kit.hub_processes import Client, HubProcess, ending, hello, write_run
from kit.rl_nodes import config_of, records, run
from kit.waiting import until
from test_page import page_of
from test_views import Writer

from aedit.launch.cli import main
from aedit.launch.config import AlertConfig, RunConfig, load, of_this_machine
from aedit.launch.records import Alerts, Clock, HubWatch, NodeAlerts, NodeWatch, Recorder, RLMetric, read_run
from aedit.launch.records.alerts import AcceptedPushes, of_disk
from aedit.launch.records.recorder import Tracker
from aedit.types import UserError

ALERTS = AlertConfig()


@contextmanager
def receiver(status=200):
    """Serve a webhook; yield its URL and the list of what it has received."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


# -- when


def test_a_loss_is_an_alert_once_it_was_finite_and_is_not():
    watch = NodeWatch(ALERTS)
    assert watch.alerts(nan, None) == {}  # before the first step
    assert watch.alerts(2.0, None) == {}
    for loss in (nan, inf, -inf):
        assert "loss" in watch.alerts(loss, None)
    assert watch.alerts(3.0, None) == {}


def test_mismatch_is_an_alert_above_its_bound_only():
    watch = NodeWatch(AlertConfig(mismatch_kl=0.1))
    assert watch.alerts(1.0, RLMetric(mismatch_kl=0.1)) == {}
    assert "alerts.mismatch_kl = 0.1" in watch.alerts(1.0, RLMetric(mismatch_kl=0.11))["mismatch"]
    assert watch.alerts(1.0, RLMetric(mismatch_kl=nan)) == {}
    assert NodeWatch(AlertConfig(mismatch_kl=0.0)).alerts(1.0, RLMetric(mismatch_kl=9.0)) == {}


def test_rewards_are_an_alert_while_all_of_the_newest_rollouts_have_none():
    watch = NodeWatch(ALERTS)
    totals = ((8, 0), (16, 8), (16, 8), (24, 15), (32, 23))
    found = [bool(watch.alerts(1.0, RLMetric(rollouts=a, excluded=b))) for a, b in totals]
    assert found == [False, True, True, False, True]


def test_pushes_are_an_alert_after_ten_usual_intervals_and_end_with_the_next_push():
    pushes = AcceptedPushes(ALERTS)
    for t in range(0, 101, 10):  # one push every 10 s
        assert pushes.alerts(t // 10, float(t), expected=True) == {}
    assert pushes.alerts(10, 199.0, expected=True) == {}
    assert pushes.alerts(10, 201.0, expected=True)
    assert pushes.alerts(11, 202.0, expected=True) == {}
    # Times without nodes do not count.
    assert pushes.alerts(11, 390.0, expected=False) == {}
    assert pushes.alerts(11, 470.0, expected=True) == {}
    assert pushes.alerts(11, 600.0, expected=True)


def test_fast_pushes_may_pause_for_half_a_minute():
    pushes = AcceptedPushes(ALERTS)
    for t in range(100):
        pushes.alerts(t, t / 10, expected=True)
    assert pushes.alerts(99, 39.0, expected=True) == {}
    assert pushes.alerts(99, 40.0, expected=True)
    off = AcceptedPushes(AlertConfig(intervals=0))
    for t in range(100):
        off.alerts(min(t, 50), float(t), expected=True)
    assert off.alerts(50, 1e6, expected=True) == {}


def test_a_disk_is_an_alert_below_its_bound(tmp_path):
    assert of_disk(AlertConfig(disk_bytes=0), tmp_path) == {}
    assert of_disk(AlertConfig(disk_bytes=1 << 60), tmp_path)
    assert of_disk(AlertConfig(disk_bytes=1 << 60), tmp_path / "missing") == {}


def test_a_hub_names_the_node_whose_loss_is_not_finite(tmp_path):
    def status(loss, mismatch=1e-6):
        rl = {"mismatch_kl": mismatch}
        node = {"node": 0, "name": "box", "live": True, "accepted": 1, "loss": loss, "rl": rl}
        gone = {**node, "node": 1, "name": "gone", "live": False}
        return {"nodes": [node, gone], "progress": 0.5}

    watch = HubWatch(AlertConfig(disk_bytes=0), tmp_path)
    assert watch.alerts(status(None), 0.0) == {}
    assert watch.alerts(status(2.0), 1.0) == {}
    assert watch.alerts(status(None), 2.0) == {"loss of box": "box: the training loss is not finite"}
    assert list(watch.alerts(status(2.0, 1.0), 3.0)) == ["mismatch of box"]


# -- where


def test_an_alert_is_one_event_at_its_begin_one_at_its_end_and_goes_to_trackers(tmp_path):
    numbers = []
    tracker = Tracker("kept", lambda values, step: numbers.append((values, step)), lambda: None)
    out = Recorder(tmp_path / "nodes" / "0", Clock(lambda: 5.0), writes=True, trackers=lambda: [tracker])
    out.event("start", step=0)
    alerts = Alerts(ALERTS, "run", "node 0", out.event)
    for found in ({}, {"loss": "bad"}, {"loss": "bad"}, {"loss": "worse", "disk": "full"}, {"disk": "full"}):
        alerts.update(found, step=7)
    assert numbers == [
        ({"alert/loss": 1.0, "step": 7}, 7),
        ({"alert/disk": 1.0, "step": 7}, 7),
        ({"alert/loss": 0.0, "step": 7}, 7),
    ]
    node = read_run(tmp_path).nodes[0]
    assert [notice.event for notice in node.notices] == ["alert", "alert", "alert_over"]
    assert node.alerts == ("full (since 5 s)",)
    out.event("start", step=7)
    out.close()
    assert read_run(tmp_path).nodes[0].alerts == ()  # a new process looks anew


def test_a_node_whose_pushes_are_not_accepted_any_more_gives_an_alert_to_its_trackers(tmp_path):
    numbers = []
    tracker = Tracker("kept", lambda values, step: numbers.append((values, step)), lambda: None)
    out = Recorder(tmp_path / "nodes" / "0", Clock(lambda: 5.0), writes=True, trackers=lambda: [tracker])
    config = AlertConfig(disk_bytes=0)
    node = NodeAlerts(config, tmp_path, Alerts(config, "run", "node 0", out.event))
    for t in range(200):
        # A push is accepted every 4 s, and none from 80 s to 150 s: ten intervals are 40 s.
        accepted = min(t, 80) // 4 + max(0, t - 150)
        node.look(2.0, None, t, accepted=accepted, spent_s=float(t))
    out.close()
    assert numbers == [
        ({"alert/pushes": 1.0, "step": 120}, 120),
        ({"alert/pushes": 0.0, "step": 151}, 151),
    ]


def test_active_alerts_are_in_status_and_on_the_page(tmp_path, capsys):
    writer = Writer(tmp_path, 3)
    writer.start()
    writer.metric(1.0, step=1)
    writer.event("alert", 61.0, kind="loss", message="the training loss is not finite")
    writer.event("alert", 62.0, kind="disk", message="<b>full</b>")
    writer.event("alert_over", 63.0, kind="disk", message="<b>full</b>")
    (tmp_path / "run.toml").write_text('name = "x"\n')
    assert page_of(tmp_path)["alerts"] == ["node 3: the training loss is not finite (since 61 s)"]
    assert main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "alert: node 3: the training loss is not finite" in text
    assert "alert: node 3: <b>full" not in text


def test_a_webhook_gets_each_alert_and_its_end(tmp_path):
    events = []
    with receiver() as (url, got):
        alerts = Alerts(
            replace(ALERTS, webhook=url),
            "run",
            "hub",
            lambda event, **values: events.append((event, values)),
            posts=("disk",),
        )
        alerts.update({"disk": "full", "loss": "bad"})
        alerts.update({})
        until(lambda: len(got) == 2, "two messages")
    common = {"run": "run", "source": "hub", "kind": "disk", "text": "full"}
    assert got == [{**common, "over": False}, {**common, "over": True}]
    assert [event for event, _ in events] == ["alert", "alert", "alert_over", "alert_over"]


@pytest.mark.parametrize("answers", [True, False])
def test_a_webhook_that_fails_is_reported_once_without_its_url(answers):
    failed = threading.Event()
    events = []

    def event(name, **values):
        events.append((name, values))
        if name == "webhook_failed":
            failed.set()

    with receiver(500) as (url, _):
        place = url if answers else "http://127.0.0.1:1/secret-path"
        alerts = Alerts(replace(ALERTS, webhook=place), "run", "hub", event)
        for k in range(3):
            alerts.update({f"kind{k}": "x"})
        assert failed.wait(60)
    reasons = [values["reason"] for name, values in events if name == "webhook_failed"]
    assert reasons[0].startswith("alerts.webhook: ")
    assert "secret" not in str(events)


@pytest.mark.parametrize("url", ["ftp://x/secret", "x", "http://", "http://[", "file:///etc/passwd"])
def test_a_wrong_url_gets_one_line_that_does_not_show_it(tmp_path, url):
    (tmp_path / "run.toml").write_text(f"[alerts]\nwebhook = {json.dumps(url)}\n")
    with pytest.raises(UserError, match=r"alerts\.webhook must be an http") as caught:
        load(tmp_path / "run.toml", [])
    assert "//x/secret" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def test_a_node_records_a_loss_that_is_not_finite(tmp_path):
    config = config_of(tmp_path, train__steps=3, alerts__disk_bytes=1 << 60, drafter__kind="off")

    nodes = []

    def spoil(node):
        nodes.append(node)
        original, steps = node.meter.mean_loss, []

        def mean_loss(shards):
            steps.append(original(shards))
            return steps[-1] if len(steps) == 1 else nan

        kind = type(node.meter)
        spoilt = {"__slots__": (), "mean_loss": lambda _, shards: mean_loss(shards)}
        node.meter.__class__ = type("Spoilt", (kind,), spoilt)
        node.recorder.line_is_due = lambda: True

    run(config, spoil)
    kinds = [event["kind"] for event in records(config, "events") if event["event"] == "alert"]
    assert kinds == ["disk", "loss"]
    landed = [event for event in records(config, "events") if event["event"] == "round"]
    assert nodes[0].num_accepted == len(landed) > 0


def test_a_real_hub_gives_its_alerts_to_status_and_webhook_and_its_webhook_to_no_node(tmp_path, capsys):
    with receiver() as (url, got), ending():
        more = f'[alerts]\ndisk_bytes = {1 << 60}\nwebhook = "{url}"\n'
        hub = HubProcess(write_run(tmp_path, more), tmp_path / "hub")
        node = Client(hub.address, name="box").found()
        until(lambda: node.status().get("alerts"), "the alert in the status")
        until(lambda: got, "the webhook")
        assert got[0]["kind"] == "disk"
        assert main(["status", hub.address]) == 0
        assert "alert: hub: " in capsys.readouterr().out
        assert "secret-path" not in json.dumps(node.status())
        given = hello(hub.address).config
        assert "steps" in given
        assert "alerts" not in given
        node.hub.close()
    events = [json.loads(text) for text in (tmp_path / "hub" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "alert"] == ["disk"]


def test_a_node_takes_no_webhook_from_a_hub():
    shared = replace(RunConfig(), alerts=AlertConfig(webhook="https://example.org/secret"))
    assert of_this_machine(shared).alerts == AlertConfig()
